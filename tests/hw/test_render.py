# SPDX-License-Identifier: Apache-2.0
"""Templates: what is undefined, wrong or broken is named before or by the compiler."""

from dataclasses import replace

import pytest

jinja2 = pytest.importorskip("jinja2", reason="rendering needs jinja2: pip install jinja2")

from hillinfer_hw.csim_build import CsimBuildError, compile_sources  # noqa: E402
from hillinfer_hw.render import HARDWARE, render  # noqa: E402
from hillinfer_hw.toolchain import MissingToolError, find_ap_types, find_compiler  # noqa: E402
from hillinfer_model.choices import KeyMode, Rule  # noqa: E402
from hillinfer_model.hardware_spec import HardwareSpecError  # noqa: E402
from hillinfer_model.kernel_spec import KernelSpec, ProductStyle  # noqa: E402
from hillinfer_model.presets import PRESETS, preset_spec  # noqa: E402

SPEC = KernelSpec(64, 2, 2)
BROKEN = """\
// The error is in line 7 of this template, whatever is rendered above it.
{% for index in range(40) %}
constexpr int VALUE_{{ index }} = {{ index }};
{% endfor %}
{% if spec.kv_heads == 2 %}
extern "C" int sum() {
    return VALUE_1 + not_declared;
}
{% endif %}
"""


def template(tmp_path, text, name="broken.cpp"):
    path = tmp_path / f"{name}.j2"
    path.write_text(text)
    return path


def compiled(text):
    try:
        find_compiler()
        find_ap_types()
    except MissingToolError as missing:
        pytest.skip(str(missing))
    return compile_sources("broken.cpp", {"broken.cpp": text}, [])


def test_an_undefined_name_stops_rendering(tmp_path):
    with pytest.raises(jinja2.UndefinedError, match="kv_head_count"):
        render(template(tmp_path, "int a = {{ kv_head_count }};\n"), SPEC)
    with pytest.raises(jinja2.UndefinedError, match="kv_head_count"):
        render(template(tmp_path, "{% if spec.kv_head_count %}{% endif %}\n"), SPEC)


def test_a_template_that_changed_is_read_anew(tmp_path):
    assert "int a = 2;" in render(template(tmp_path, "int a = {{ spec.kv_heads }};\n"), SPEC)
    assert "int b = 2;" in render(template(tmp_path, "int b = {{ spec.kv_heads }};\n"), SPEC)


def test_a_template_syntax_error_names_file_and_line(tmp_path):
    path = template(tmp_path, "int a;\n{% if true %}\nint b;\n{% endif %}\n{% endfoo %}\n")
    with pytest.raises(jinja2.TemplateSyntaxError) as error:
        render(path, SPEC)
    assert error.value.lineno == 5
    assert error.value.filename == str(path)


def test_a_compiler_error_names_the_line_of_the_template(tmp_path):
    path = template(tmp_path, BROKEN)
    with pytest.raises(CsimBuildError, match=rf"{path}:7:.*not_declared"):
        compiled(render(path, SPEC))


def test_the_mended_template_compiles(tmp_path):
    text = render(template(tmp_path, BROKEN.replace("not_declared", "VALUE_2")), SPEC)
    assert compiled(text).is_file()


@pytest.mark.parametrize(
    ("suffix", "mark"), [("cpp", "#line 1"), ("h", "#line 1"), ("sv", "`line 1")]
)
def test_every_language_has_its_line_mark(suffix, mark, tmp_path):
    path = template(tmp_path, "x {{ spec.kv_heads }}\n", f"a.{suffix}")
    text = render(path, SPEC)
    assert text.startswith(f'{mark} "{path}"')
    assert text.splitlines()[1] == "x 2"


@pytest.mark.parametrize("name", ["hls/make_shadow.cpp.j2", "hls/spec.h.j2", "rtl/macros.sv.j2"])
def test_our_own_templates_are_named_from_the_repository_s_root(name):
    first = render(HARDWARE / name, SPEC, reader="bursts").splitlines()[0]
    assert first.split(" ", 2)[:2] in (["#line", "1"], ["`line", "1"])
    assert first.split(" ", 2)[2].startswith(f'"hw/{name}"')


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(SPEC, head_dim=50), "head_dim=50 is not supported"),
        (replace(SPEC, kv_heads=41), "kv_heads=41"),
        (replace(SPEC, group_size=9), "group_size=9"),
        (replace(SPEC, block_tokens=1000), "block_tokens=1000 is not a multiple of"),
        (replace(SPEC, product_style=ProductStyle.MIXED), "product_style=mixed"),
    ],
)
def test_a_bad_spec_fails_before_rendering(spec, reason, tmp_path):
    # The template would fail too; the spec's reason comes first.
    with pytest.raises(HardwareSpecError, match=reason):
        render(template(tmp_path, "{{ undefined }}\n"), spec)


def test_too_much_on_chip_memory_fails_before_rendering(tmp_path):
    largest = KernelSpec(256, 40, 8, key_mode=KeyMode.FP16)
    with pytest.raises(HardwareSpecError, match=r"needs 116.5 block RAMs .* of the 98"):
        render(template(tmp_path, "{{ undefined }}\n"), largest)
    render(template(tmp_path, "x\n"), replace(largest, kv_heads=20))


@pytest.mark.parametrize("preset", PRESETS)
def test_the_hash_of_the_spec_is_in_the_kernel(preset):
    texts = {
        render(HARDWARE / "hls" / "spec.h.j2", preset_spec(preset, mode, rule))
        for mode in KeyMode
        for rule in Rule
    }
    assert len({text.split("SPEC_HASH = ")[1] for text in texts}) == 8
    spec = preset_spec(preset, KeyMode.INT4, Rule.RAW_SUM)
    number = int.from_bytes(spec.digest()[:8], "little")
    assert f"SPEC_HASH = 0x{number:016x}ULL" in render(HARDWARE / "hls" / "spec.h.j2", spec)
