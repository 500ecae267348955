"""The graphs that cuDNN refuses on an H100, asked without one: reads a JSON list of calls from
stdin and prints the reason for each that it refuses. cuDNN loads stand-ins of CUDA's libraries."""

import ctypes
import json
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

# Properties of the device for cuDNN's heuristics (cudnn-frontend: create_device_properties).
H100 = {
    "deviceVer": 900, "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048, "regsPerBlock": 65536, "totalGlobalMem": 84978434048,
    "smClockRateKHz": 1980000, "l2CacheSize": 52428800, "maxBlockSize": [1024, 1024, 64],
    "memClockRateKHz": 2619000, "maxGridSize": [2147483647, 65535, 65535], "supportCoopLaunch": 1,
    "memoryBusWidth": 5120, "oversizedSharedMemoryPerBlock": 0, "pciDeviceId": 0, "isTccDriver": 0,
    "cudaDeviceId": 0, "driverVer": 13000, "deviceName": "NVIDIA H100 80GB HBM3",
}  # fmt: skip
ATTRIBUTE = (
    "int {name}(int*v,int a,int d){{*v= a==75?9: a==76?0: a==16?132: a==97?232448:0;return 0;}}\n"
)
NAMES = """
cuCtxGetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuGetErrorName
cuGetErrorString cuKernelGetAttribute cuKernelGetFunction cuKernelSetAttribute
cuLaunchCooperativeKernel cuLaunchKernel cuLaunchKernelEx cuLibraryGetKernel
cuLibraryLoadData cuLibraryLoadFromFile cuLibraryUnload cuLinkAddData cuLinkComplete
cuLinkCreate cuLinkDestroy cuModuleGetFunction cuModuleLoadData cuModuleUnload
cuOccupancyMaxPotentialClusterSize cuStreamGetCtx cuTensorMapEncodeIm2col
cuTensorMapEncodeTiled
"""
DRIVER = (
    "int cuDriverGetVersion(int*v){*v=13000;return 0;} int cuDeviceGetCount(int*v){*v=1;return 0;}\n"
    "int cuDeviceGet(int*v,int d){*v=0;return 0;} int cuInit(int f){return 0;}\n"
) + ATTRIBUTE.format(name="cuDeviceGetAttribute") + "".join(
    f"int {name}(void){{return 0;}}\n"
    for name in NAMES.split()
)  # fmt: skip
RUNTIME = (
    "#include <string.h>\nint cudaGetDevice(int*d){*d=0;return 0;}\nint cudaSetDevice(int d){return 0;}\n"
    "int cudaGetDeviceCount(int*d){*d=1;return 0;}\n"
    'static int props(char*p){memset(p,0,900);strcpy(p,"NVIDIA H100 80GB HBM3");'
    "*(int*)(p+360)=9;*(int*)(p+364)=0;*(int*)(p+308)=32;return 0;}\n"
    "int cudaGetDeviceProperties(char*p,int d){return props(p);}\n"
    "int cudaGetDeviceProperties_v2(char*p,int d){return props(p);}\n"
    'const char* cudaGetErrorString(int e){return "stub";}\n'
    "int cudaRuntimeGetVersion(int*v){*v=13000;return 0;}\n"
    "int cudaDriverGetVersion(int*v){*v=13000;return 0;}\n"
) + ATTRIBUTE.format(name="cudaDeviceGetAttribute")


MATMUL = """#include <stddef.h>
size_t cublasLtGetVersion(void){return 130000;} size_t cublasLtGetCudartVersion(void){return 13000;}
"""
LIBRARIES = {
    "libcuda.so.1": DRIVER,
    "libcudart.so.13": RUNTIME,
    "libcublas.so.13": MATMUL,
    "libcublasLt.so.13": MATMUL,
}


def stand_ins() -> None:
    """Compiles the libraries of CUDA that cuDNN loads, and loads them first."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in LIBRARIES.items():
            path = Path(folder, name)
            command = ["cc", "-w", "-shared", "-fPIC", "-x", "c", f"-Wl,-soname,{name}"]
            subprocess.run([*command, "-o", path, "-"], input=text, text=True, check=True)
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def refused(call: dict[str, Any], device: Any) -> str | None:
    """The reason why cuDNN has no kernel for a call, or None."""
    cudnn: Any = import_module("cudnn")
    half = {"bfloat16": cudnn.data_type.BFLOAT16, "float16": cudnn.data_type.HALF}[call["dtype"]]
    wide, count = cudnn.data_type.FLOAT, cudnn.data_type.INT32
    graph = cudnn.pygraph(
        io_data_type=half,
        intermediate_data_type=wide,
        compute_data_type=wide,
        device_property=device,
    )

    sequences, pages = call["sequences"], call["pages"]

    def integers(name: str, dim: list[int]) -> Any:
        stride = [dim[2], dim[2], 1, 1]
        return graph.tensor(name=name, dim=dim, stride=stride, data_type=count)

    def heads(name: str, shape: list[int]) -> Any:
        B, T, N, H = shape
        strides = [T * N * H, H, N * H, 1]
        if call["layout"] == "BNTH":
            (B, N, T, H), strides = shape, [N * T * H, T * H, H, 1]
        dim = [B * max(sequences, 1), N, T, H]
        found = graph.tensor(name=name, dim=dim, stride=strides, data_type=half)
        if sequences:
            found.set_ragged_offset(offsets[name in ("key", "value")])
        return found

    every = call["query"][0] * max(sequences, 1)
    offsets = [integers(f"{x} offsets", [every + 1, 1, 1, 1]) for x in "qk"] if sequences else []
    q, k, v = (heads(name, call[name]) for name in ("query", "key", "value"))
    B, N, T, _ = q.get_dim()
    out_shape = [*call["query"][:3], call["value"][3]]
    o = heads("out", out_shape)
    options: dict[str, Any] = {"attn_scale": 0.1, "use_causal_mask": call["causal"]}
    if call["left"] is not None:
        options["sliding_window_length"] = call["left"]
    if call["bias"] is not None:
        _, n, t, s = call["bias"]
        options["bias"] = graph.tensor(
            name="bias", dim=call["bias"], stride=[n * t * s, t * s, s, 1], data_type=half
        )
    if call["lengths"]:
        options["use_padding_mask"] = True
        for name in ("seq_len_q", "seq_len_kv"):
            options[name] = integers(name, [B, 1, 1, 1])
    if pages:
        for name in ("paged_attention_k_table", "paged_attention_v_table"):
            options[name] = integers(name, [B, 1, pages, 1])
        options["paged_attention_max_seq_len_kv"] = pages * k.get_dim()[2]
    if call["backward"]:
        stats = graph.tensor(name="lse", dim=[B, N, T, 1], stride=[N * T, T, 1, 1], data_type=wide)
        found = graph.sdpa_backward(
            name="gradient", q=q, k=k, v=v, o=o, dO=heads("d", out_shape),
            stats=stats, **options,
        )  # fmt: skip
        for x, like in zip(found, (q, k, v), strict=True):
            x.set_output(True).set_dim(like.get_dim()).set_stride(like.get_stride())
    else:
        out, lse = graph.sdpa(name="attend", q=q, k=k, v=v, generate_stats=call["lse"], **options)
        out.set_output(True).set_dim(o.get_dim()).set_stride(o.get_stride())
        if call["lse"]:
            lse.set_output(True).set_data_type(wide)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
    except Exception as error:  # noqa: BLE001  the frontend raises its own
        return f"{call}: {error}".splitlines()[0][:400]
    return None


if __name__ == "__main__":
    stand_ins()
    device = import_module("cudnn").create_device_properties(json.dumps(H100))
    print(json.dumps([x for x in (refused(call, device) for call in json.load(sys.stdin)) if x]))
