// SPDX-License-Identifier: Apache-2.0
// Module pyxrt for machines that have XRT's headers and libraries but not its Python binding: the
// public names of XRT's own pyxrt, as far as scripts use them. Long calls release the interpreter.
#include <cstdint>
#include <string>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "experimental/xrt_xclbin.h"
#include "xrt/xrt_bo.h"
#include "xrt/xrt_device.h"
#include "xrt/xrt_kernel.h"

namespace py = pybind11;
using Released = py::call_guard<py::gil_scoped_release>;

namespace {

// XRT copies as many bytes of a scalar as the argument has; numbers are little-endian.
void set_argument(xrt::run& run, int index, const py::handle& value) {
    if (py::isinstance<xrt::bo>(value)) {
        run.set_arg(index, value.cast<xrt::bo&>());
    } else if (py::isinstance<py::float_>(value)) {
        run.set_arg(index, value.cast<float>());
    } else if (py::hasattr(value, "__index__")) {
        py::int_ whole(value.attr("__index__")());
        bool negative = whole.attr("__lt__")(0).cast<bool>();
        if (negative) run.set_arg(index, whole.cast<int64_t>());
        else run.set_arg(index, whole.cast<uint64_t>());
    } else {
        throw py::type_error("argument " + std::to_string(index)
            + " is a " + std::string(py::str(py::type::of(value).attr("__name__")))
            + "; pass a bo, an int or a float");
    }
}

py::memoryview mapped(xrt::bo& buffer) {
    return py::memoryview::from_memory(buffer.map<uint8_t*>(), (py::ssize_t)buffer.size(), false);
}

// A slice that does not lie in the buffer is an error here; XRT would overrun.
void check_range(const xrt::bo& buffer, size_t size, size_t offset) {
    if (offset > buffer.size() || size > buffer.size() - offset)
        throw py::value_error(std::to_string(size) + " bytes at " + std::to_string(offset)
            + " do not lie in a buffer of " + std::to_string(buffer.size()));
}

}  // namespace

PYBIND11_MODULE(pyxrt, m) {
    m.doc() = "Python binding of the Xilinx Runtime's native interface";

    py::enum_<xclBOSyncDirection>(m, "xclBOSyncDirection")
        .value("XCL_BO_SYNC_BO_TO_DEVICE", XCL_BO_SYNC_BO_TO_DEVICE)
        .value("XCL_BO_SYNC_BO_FROM_DEVICE", XCL_BO_SYNC_BO_FROM_DEVICE);
    py::enum_<ert_cmd_state>(m, "ert_cmd_state")
        .value("ERT_CMD_STATE_NEW", ERT_CMD_STATE_NEW)
        .value("ERT_CMD_STATE_QUEUED", ERT_CMD_STATE_QUEUED)
        .value("ERT_CMD_STATE_RUNNING", ERT_CMD_STATE_RUNNING)
        .value("ERT_CMD_STATE_COMPLETED", ERT_CMD_STATE_COMPLETED)
        .value("ERT_CMD_STATE_ERROR", ERT_CMD_STATE_ERROR)
        .value("ERT_CMD_STATE_ABORT", ERT_CMD_STATE_ABORT)
        .value("ERT_CMD_STATE_SUBMITTED", ERT_CMD_STATE_SUBMITTED)
        .value("ERT_CMD_STATE_TIMEOUT", ERT_CMD_STATE_TIMEOUT)
        .value("ERT_CMD_STATE_NORESPONSE", ERT_CMD_STATE_NORESPONSE);
    py::enum_<xrt::info::device>(m, "xrt_info_device")
        .value("bdf", xrt::info::device::bdf)
        .value("interface_uuid", xrt::info::device::interface_uuid)
        .value("max_clock_frequency_mhz", xrt::info::device::max_clock_frequency_mhz)
        .value("name", xrt::info::device::name)
        .value("memory", xrt::info::device::memory)
        .value("pcie_info", xrt::info::device::pcie_info)
        .value("platform", xrt::info::device::platform)
        .value("dynamic_regions", xrt::info::device::dynamic_regions);

    py::class_<xrt::uuid>(m, "uuid")
        .def(py::init<const std::string&>())
        .def("to_string", &xrt::uuid::to_string);

    using xclbin = xrt::xclbin;
    py::class_<xclbin::mem>(m, "xclbinmem")
        .def("get_tag", &xclbin::mem::get_tag)
        .def("get_base_address", &xclbin::mem::get_base_address)
        .def("get_size_kb", &xclbin::mem::get_size_kb)
        .def("get_used", &xclbin::mem::get_used)
        .def("get_index", &xclbin::mem::get_index);
    py::class_<xclbin::arg>(m, "xclbinarg")
        .def("get_name", &xclbin::arg::get_name)
        .def("get_port", &xclbin::arg::get_port)
        .def("get_size", &xclbin::arg::get_size)
        .def("get_offset", &xclbin::arg::get_offset)
        .def("get_index", &xclbin::arg::get_index)
        .def("get_mems", &xclbin::arg::get_mems);
    py::class_<xclbin::ip>(m, "xclbinip")
        .def("get_name", &xclbin::ip::get_name)
        .def("get_num_args", &xclbin::ip::get_num_args)
        .def("get_args", &xclbin::ip::get_args)
        .def("get_base_address", &xclbin::ip::get_base_address);
    py::class_<xclbin::kernel>(m, "xclbinkernel")
        .def("get_name", &xclbin::kernel::get_name)
        .def("get_num_args", &xclbin::kernel::get_num_args)
        .def("get_args", &xclbin::kernel::get_args)
        .def("get_cus", [](const xclbin::kernel& kernel) { return kernel.get_cus(); });
    py::class_<xclbin>(m, "xclbin")
        .def(py::init<const std::string&>())
        .def("get_kernels", &xclbin::get_kernels)
        .def("get_ips", &xclbin::get_ips)
        .def("get_mems", &xclbin::get_mems)
        .def("get_xsa_name", &xclbin::get_xsa_name)
        .def("get_uuid", &xclbin::get_uuid);

    py::class_<xrt::device>(m, "device")
        .def(py::init([](unsigned index) { return xrt::device(index); }), Released())
        .def(py::init([](const std::string& name) { return xrt::device(name); }), Released())
        .def("load_xclbin", [](xrt::device& own, const std::string& path) {
            return own.load_xclbin(path);
        }, Released())
        .def("load_xclbin", [](xrt::device& own, const xclbin& image) {
            return own.load_xclbin(image);
        }, Released())
        .def("get_xclbin_uuid", &xrt::device::get_xclbin_uuid)
        .def("get_info", [](const xrt::device& own, xrt::info::device what) -> std::string {
            using query = xrt::info::device;
            switch (what) {
                case query::bdf: return own.get_info<query::bdf>();
                case query::interface_uuid:
                    return own.get_info<query::interface_uuid>().to_string();
                case query::max_clock_frequency_mhz:
                    return std::to_string(own.get_info<query::max_clock_frequency_mhz>());
                case query::name: return own.get_info<query::name>();
                case query::memory: return own.get_info<query::memory>();
                case query::pcie_info: return own.get_info<query::pcie_info>();
                case query::platform: return own.get_info<query::platform>();
                case query::dynamic_regions: return own.get_info<query::dynamic_regions>();
                default: throw py::value_error("this binding does not know that query");
            }
        });

    py::class_<xrt::bo> buffer(m, "bo");
    py::enum_<xrt::bo::flags>(buffer, "flags")
        .value("normal", xrt::bo::flags::normal)
        .value("cacheable", xrt::bo::flags::cacheable)
        .value("device_only", xrt::bo::flags::device_only)
        .value("host_only", xrt::bo::flags::host_only)
        .value("p2p", xrt::bo::flags::p2p)
        .value("svm", xrt::bo::flags::svm)
        .export_values();
    buffer
        .def(py::init([](xrt::device& own, size_t size, xrt::bo::flags flags, unsigned group) {
            return xrt::bo(own, size, flags, group);
        }), Released())
        .def(py::init([](xrt::bo& parent, size_t size, size_t offset) {
            check_range(parent, size, offset);
            return xrt::bo(parent, size, offset);
        }))
        .def("write", [](xrt::bo& own, const py::buffer& data, size_t offset) {
            py::buffer_info from = data.request();
            size_t size = (size_t)(from.size * from.itemsize);
            check_range(own, size, offset);
            own.write(from.ptr, size, offset);
        }, py::arg("data"), py::arg("offset") = 0)
        .def("read", [](xrt::bo& own, size_t size, size_t offset) {
            check_range(own, size, offset);
            std::string content(size, '\0');
            own.read(content.data(), size, offset);
            return py::bytes(content);
        }, py::arg("size"), py::arg("offset") = 0)
        .def("map", &mapped, py::keep_alive<0, 1>())
        .def("sync", [](xrt::bo& own, xclBOSyncDirection direction) { own.sync(direction); },
             Released())
        .def("sync", [](xrt::bo& own, xclBOSyncDirection direction, size_t size, size_t offset) {
            check_range(own, size, offset);
            own.sync(direction, size, offset);
        }, Released())
        .def("size", &xrt::bo::size)
        .def("address", &xrt::bo::address);

    py::class_<xrt::run>(m, "run")
        .def(py::init<const xrt::kernel&>())
        .def("set_arg", &set_argument)
        .def("start", [](xrt::run& own) { own.start(); }, Released())
        .def("state", &xrt::run::state)
        .def("wait", [](xrt::run& own) { return own.wait(); }, Released())
        .def("wait", [](xrt::run& own, unsigned milliseconds) { return own.wait(milliseconds); },
             Released());

    py::class_<xrt::kernel> kernel(m, "kernel");
    py::enum_<xrt::kernel::cu_access_mode>(kernel, "cu_access_mode")
        .value("exclusive", xrt::kernel::cu_access_mode::exclusive)
        .value("shared", xrt::kernel::cu_access_mode::shared)
        .value("none", xrt::kernel::cu_access_mode::none)
        .export_values();
    kernel
        .def(py::init([](const xrt::device& own, const xrt::uuid& id, const std::string& name,
                         xrt::kernel::cu_access_mode mode) {
            return xrt::kernel(own, id, name, mode);
        }), py::arg("device"), py::arg("uuid"), py::arg("name"),
            py::arg("mode") = xrt::kernel::cu_access_mode::shared)
        .def("__call__", [](xrt::kernel& own, const py::args& arguments) {
            xrt::run run(own);
            int index = 0;
            for (const py::handle& value : arguments) set_argument(run, index++, value);
            py::gil_scoped_release released;
            run.start();
            return run;
        })
        .def("group_id", &xrt::kernel::group_id)
        .def("read_register", &xrt::kernel::read_register)
        .def("write_register", &xrt::kernel::write_register);
}
