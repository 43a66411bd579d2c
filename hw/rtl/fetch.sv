// SPDX-License-Identifier: Apache-2.0
// Descriptors: reads them one ahead, checks them, and tells the other processes what a segment is:
// the writer a record, the key reader its rows, the core the segment's size and, from the same
// port as the descriptors, its statistics and query block.
module fetch #(
    parameter int KIND = 0,            // 0 scores from a shadow, 1 scores from rows, 2 a shadow
    parameter int HEAD_DIM = 64,       // padded
    parameter int KV = 3,
    parameter int HEADS = 9,           // rows of query codes
    parameter int CODE_BITS = 4,
    parameter int SEGMENT_TOKENS = 1024,
    parameter int QUERIES = 1          // of a segment at most
) (
    input  logic         clk,
    input  logic         rst,
    input  logic         go,
    input  logic [31:0]  segment_count,
    input  logic [31:0]  scope,         // 0 layer, 1 kv_head; above it further queries
    input  logic [57:0]  segments,      // base addresses in beats
    input  logic [57:0]  keys,
    input  logic [57:0]  statistics,
    input  logic [57:0]  queries,
    input  logic [57:0]  target,        // scores, or the shadow that is made
    // Read engine of this port.
    output logic         read_valid,
    input  logic         read_ready,
    output logic [57:0]  read_beat,
    output logic [31:0]  read_beats,
    input  logic         beat_valid,
    output logic         beat_ready,
    input  logic [511:0] beat_data,
    input  logic         beat_error,
    // Core.
    output logic         load_valid,
    input  logic         load_ready,
    output logic [511:0] load_data,
    output logic         seg_valid,
    input  logic         seg_ready,
    output logic [16:0]  seg_tokens,
    output logic [15:0]  seg_position,
    // Key reader.
    output logic         key_valid,
    input  logic         key_ready,
    output logic [31:0]  key_index,
    output logic [57:0]  key_beat,
    output logic [31:0]  key_beats,     // of a row
    output logic [16:0]  key_rows,
    output logic [31:0]  key_stride,
    output logic [31:0]  key_total,
    // Writer: `record_end` after the last segment; an error ends the launch.
    output logic         record_valid,
    input  logic         record_ready,
    output logic         record_end,
    output logic [1:0]   record_error,
    output logic [16:0]  record_tokens,
    output logic [57:0]  record_beat,
    output logic [31:0]  record_stride,
    // A statistics or query beat of this segment came with a bus error.
    output logic         fault,
    output logic [31:0]  fault_index
);
    localparam int SLICES = HEAD_DIM / 16;
    localparam int TILE = 512 / (16 * CODE_BITS);
    localparam int GROUP_BEATS = KV * (1 + HEAD_DIM * CODE_BITS / 8);
    localparam int ROW_BEATS = (KV * HEAD_DIM * 2 + 63) / 64;
    localparam int STATISTICS_BEATS = (KIND == 0) ? 0 : (KV * HEAD_DIM * 4 + 63) / 64;
    localparam int QUERY_BEATS = (KIND == 2) ? 0
        : (HEADS * 4 + 63) / 64 + (HEADS + 63) / 64 + (HEADS * HEAD_DIM + 63) / 64;
    localparam int POSITION = $clog2(SEGMENT_TOKENS);
    localparam logic [1:0] NO_ERROR = 0, BAD_DESCRIPTOR = 1, BUS = 2, RESERVED = 3;

    // Times a constant, in adders: a plain `*` would take a DSP.
    function automatic logic [31:0] times(input logic [31:0] value, input logic [31:0] constant);
        integer i;
        begin
            times = 32'd0;
            for (i = 0; i < 20; i = i + 1) if (constant[i]) times = times + (value << i);
        end
    endfunction

    localparam logic [3:0] IDLE = 0, ASK = 1, WAIT = 2, RECORD = 3, SEGMENT = 4, KEYS = 5,
        ASK_STATISTICS = 6, ASK_QUERY = 7, ASK_NEXT = 8, LOAD = 9, ENDED = 10;
    logic [3:0] state;

    // Fields (contract, section 10): of the beat that has arrived, and, for the checks and what is
    // worked out beside them, of the one that comes.
    logic [511:0] arrived;
    logic [63:0] at_0, at_8, at_16, base, at_48;
    logic [31:0] tokens, row_stride, score_stride;
    assign {at_16, at_8, at_0} = arrived[191:0];
    assign base = arrived[255:192];
    assign tokens = arrived[287:256];
    assign row_stride = arrived[319:288];
    assign score_stride = arrived[351:320];
    assign at_48 = arrived[447:384];
    logic [63:0] new_at_16, new_base, new_at_48;
    logic [31:0] new_tokens, new_row_stride, new_score_stride;
    logic reserved;
    assign new_at_16 = beat_data[191:128];
    assign new_base = beat_data[255:192];
    assign new_tokens = beat_data[287:256];
    assign new_row_stride = beat_data[319:288];
    assign new_score_stride = beat_data[351:320];
    assign new_at_48 = beat_data[447:384];
    assign reserved = (beat_data[383:352] != 0) || (beat_data[511:448] != 0);

    // Checks, in the words of `check_score_descriptor` and `check_shadow_descriptor`.
    logic wrong, wrong_scope;
    always_comb begin
        wrong = (new_base[POSITION-1:0] != 0) || (new_tokens > SEGMENT_TOKENS);
        if (KIND == 0) wrong = wrong || (new_row_stride != 0) || (new_at_48 != 0);
        else wrong = wrong || (new_row_stride < ROW_BEATS);
        if (KIND == 2) wrong = wrong || (new_at_16 != 0) || (new_score_stride != 0);
        else if (scope == 32'd0) wrong = wrong || (new_score_stride != 0);
        else wrong = wrong || wrong_scope || (new_score_stride < ((new_tokens + 32'd15) >> 4));
    end

    // Query blocks of a segment lie one behind the other.
    logic [31:0] query_beats;
    logic [15:0] load_beats;
    generate
        if (QUERIES == 1) begin : g_one
            assign wrong_scope = scope != 32'd1;
            assign query_beats = QUERY_BEATS;
            assign load_beats = STATISTICS_BEATS + QUERY_BEATS;
        end else begin : g_more
            always_ff @(posedge clk) begin
                wrong_scope <= scope[7:1] != 0 || scope[31:8] >= QUERIES;
                query_beats <= times({24'd0, scope[15:8]} + 1, QUERY_BEATS);
                load_beats <= STATISTICS_BEATS + query_beats;
            end
        end
    endgenerate

    // Beats of the keys.
    logic [31:0] shadow_beats, rows_beats;
    logic [5:0] rest;
    assign rest = new_tokens[5:0];
    assign shadow_beats = times({21'd0, new_tokens[16:6]}, GROUP_BEATS)
        + ((rest == 0) ? 32'd0 : KV + times(({26'd0, rest} + TILE - 1) / TILE, KV * SLICES));
    assign rows_beats = times({15'd0, new_tokens[16:0]}, ROW_BEATS);

    logic [31:0] index;
    logic [15:0] loaded;
    logic last, linear, empty;

    // The number of a segment changes two cycles or more before anyone asks for this.
    always_ff @(posedge clk) last <= (index + 32'd1 == segment_count);
    assign linear = (KIND == 0) || (row_stride == ROW_BEATS);

    // What the checks and the multiplications give, a cycle later.
    logic [1:0] error;
    logic [31:0] total;
    always_ff @(posedge clk) if (state == WAIT) begin
        arrived <= beat_data;
        error <= beat_error ? BUS : reserved ? RESERVED : wrong ? BAD_DESCRIPTOR : NO_ERROR;
        total <= (KIND == 0) ? shadow_beats : rows_beats;
        empty <= new_tokens == 0;
    end

    // The first block is asked for as soon as its segment is on record.
    logic ask_first;
    localparam logic [3:0] ASK_FIRST = (STATISTICS_BEATS != 0) ? ASK_STATISTICS : ASK_QUERY;
    localparam logic [3:0] AFTER_FIRST = (STATISTICS_BEATS != 0 && QUERY_BEATS != 0) ? ASK_QUERY
        : KEYS;
    assign ask_first = state == RECORD && record_ready && error == NO_ERROR && !empty;
    assign read_valid = (state == ASK) || (state == ASK_STATISTICS) || (state == ASK_QUERY)
        || (state == ASK_NEXT && !last) || ask_first;
    always_comb begin
        read_beat = segments + index;
        read_beats = 32'd1;
        if (state == ASK_STATISTICS || (state == RECORD && STATISTICS_BEATS != 0)) begin
            read_beat = statistics + at_48[57:0];
            read_beats = STATISTICS_BEATS;
        end
        if (state == ASK_QUERY || (state == RECORD && STATISTICS_BEATS == 0)) begin
            read_beat = queries + at_8[57:0];
            read_beats = query_beats;
        end
        if (state == ASK_NEXT) read_beat = segments + index + 1'b1;
    end

    assign load_valid = (state == LOAD) && beat_valid && !beat_error && !fault;
    assign load_data = beat_data;
    assign beat_ready = (state == WAIT) || ((state == LOAD) && load_ready && !beat_error && !fault);

    assign seg_valid = state == SEGMENT;
    assign seg_tokens = tokens[16:0];
    assign seg_position = base[15:0];

    assign key_valid = state == KEYS;
    assign key_index = index;
    assign key_beat = keys + ((KIND == 2) ? at_8[57:0] : at_0[57:0]);
    assign key_beats = linear ? total : ROW_BEATS;
    assign key_rows = linear ? 17'd1 : tokens[16:0];
    assign key_stride = row_stride;
    assign key_total = total;

    assign record_valid = (state == RECORD) || (state == ENDED);
    assign record_end = state == ENDED;
    assign record_error = error;
    assign record_tokens = tokens[16:0];
    assign record_beat = target + ((KIND == 2) ? at_0[57:0] : at_16[57:0]);
    assign record_stride = score_stride;

    always_ff @(posedge clk) begin
        if (rst) begin
            state <= IDLE;
            fault <= 1'b0;
            index <= 32'd0;
        end else case (state)
            IDLE: begin
                index <= 32'd0;
                if (go) state <= (segment_count == 0) ? ENDED : ASK;
            end
            ASK: if (read_ready) state <= WAIT;
            WAIT: if (beat_valid) state <= RECORD;
            RECORD: if (record_ready) begin
                if (error != NO_ERROR) state <= IDLE;
                else if (empty) state <= ASK_NEXT;
                // Before the keys: they wait for the query anyway.
                else state <= read_ready ? AFTER_FIRST : ASK_FIRST;
            end
            ASK_STATISTICS: if (read_ready) state <= AFTER_FIRST;
            ASK_QUERY: if (read_ready) state <= KEYS;
            KEYS: if (key_ready) state <= SEGMENT;
            SEGMENT: if (seg_ready) state <= ASK_NEXT;
            ASK_NEXT: if (read_ready || last) begin
                loaded <= 16'd0;
                state <= LOAD;
                if (empty) begin
                    index <= index + 32'd1;
                    state <= last ? ENDED : WAIT;
                end
            end
            LOAD: begin
                if (beat_valid && beat_error && !fault) begin
                    fault <= 1'b1;
                    fault_index <= index;
                end
                if (beat_valid && beat_ready) begin
                    loaded <= loaded + 16'd1;
                    if (loaded == load_beats - 1) begin
                        index <= index + 32'd1;
                        state <= last ? ENDED : WAIT;
                    end
                end
            end
            default: if (record_ready) state <= IDLE;  // ENDED
        endcase
    end
endmodule
