"""The devices of this machine, and an RPC server for them."""

from dataclasses import dataclass
from typing import NoReturn

from pylongctx._arguments import check_count, thread_counts
from pylongctx._free import free_bytes
from pylongctx._lib import error, ffi, lib, text
from pylongctx._units import bytes_text


@dataclass(frozen=True)
class Device:
    """A device that the library can compute on.

    Attributes
    ----------
    name, description, type : str
        For instance "CUDA0", the product's name, "GPU".
    memory_free, memory_total : int
        Bytes; 0 where the device does not report them.
    """

    name: str
    description: str
    type: str
    memory_free: int
    memory_total: int

    @property
    def memory(self) -> str:
        """The memory as text."""
        if not self.memory_total:
            return "memory unknown"
        return f"{bytes_text(self.memory_free)} of {bytes_text(self.memory_total)} free"


def devices() -> list[Device]:
    """Return the devices that the build can use."""
    found = []
    info = ffi.new("lctx_device_info *")
    for i in range(lib.lctx_device_count()):
        lib.lctx_device_get(i, info)
        names = text(info.name), text(info.description), text(info.type)
        # ggml reports all host memory as free
        free = min(free_bytes(), info.memory_total) if names[2] == "CPU" else info.memory_free
        found.append(Device(*names, free, info.memory_total))
    return found


def serve_devices(host: str, port: int, names: str = "", n_threads: int | None = None) -> NoReturn:
    """Serve devices over RPC until the process ends: the named ones, else all GPUs, else the CPU.

    Raises
    ------
    InvalidInput
        When the address or a device cannot be used.
    """
    n_threads, _ = thread_counts(n_threads, 1)
    reason = ffi.new("char[]", 1024)
    endpoint = f"{host}:{check_count('port', port)}"
    status = lib.lctx_rpc_serve(endpoint.encode(), names.encode(), n_threads, reason, len(reason))
    raise error(status, text(reason))
