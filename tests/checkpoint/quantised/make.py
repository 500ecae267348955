"""Writes the quantised files of this folder, each next to the arrays that its own library dequantises it to.

Not run by the tests. It needs bitsandbytes, compressed-tensors and auto-gptq, and the sources of
AutoAWQ and GPTQModel (their packages build for GPUs), in an environment of their own:

    python make.py AUTOAWQ_FOLDER GPTQMODEL_FOLDER
"""

# mypy: ignore-errors
import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
torch.manual_seed(0)


def put(name, stored, expected, config=None):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    save_file({k: v.contiguous() for k, v in expected.items()}, folder / "expected.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def bitsandbytes():
    import bitsandbytes as bnb
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.backends.utils import _get_4bit_code

    stored, expected = {}, {}
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    shapes = ((33, 64), (34, 24))
    for kind, nested, dtype, shape in itertools.product(("nf4", "fp4"), (0, 1), dtypes, shapes):
        name = f"{kind}_{nested}_{str(dtype).removeprefix('torch.')}_{shape[0]}"
        layer = bnb.nn.Linear4bit(shape[1], shape[0], bias=False, quant_type=kind)
        layer.weight = bnb.nn.Params4bit(
            torch.randn(shape).to(dtype), requires_grad=False, quant_type=kind,
            compress_statistics=bool(nested), blocksize=64,
        )  # fmt: skip
        layer = layer.to("cpu")
        stored |= {f"{name}.{k}": v for k, v in layer.state_dict().items()}
        data, state = layer.weight.data, layer.weight.quant_state
        if shape[1] % 64 == 0:
            weight = functional.dequantize_4bit(data, state)
        else:  # the kernel for CPUs of 0.50.2 is wrong here: it departs from the weight by its size
            scales = state.absmax
            if nested:
                scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
            code = _get_4bit_code(kind, torch.device("cpu"))
            weight = _dequantize_4bit_compute(data.reshape(-1), scales, code, 64, shape, dtype)
        expected[f"{name}.weight"] = weight
    put("bitsandbytes_4", stored, expected)
    weight = torch.randn(34, 48).half()
    data, scale, _ = functional.int8_vectorwise_quant(weight)
    stored = {"fc.weight": data, "fc.SCB": scale, "fc.bias": torch.randn(34).half()}
    stored["fc.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    put(
        "bitsandbytes_8",
        stored,
        {
            "fc.weight": functional.int8_vectorwise_dequant(data, scale),
            "fc.bias": stored["fc.bias"],
        },
    )


def compressed_tensors():
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    stored, expected = {}, {}
    for bits in (4, 8):
        for symmetric in (True, False):
            for strategy, group in (("group", 16), ("channel", None)):
                for dtype in (torch.bfloat16, torch.float16):
                    for packed in (True, False) if bits == 8 else (True,):
                        args = QuantizationArgs(
                            num_bits=bits, type="int", symmetric=symmetric, strategy=strategy,
                            group_size=group,
                        )  # fmt: skip
                        scheme = QuantizationScheme(targets=["Linear"], weights=args)
                        weight = torch.randn(40, 48).to(dtype)
                        groups = 48 // group if group else 1
                        apart = weight.float().reshape(40, groups, -1)
                        low, high = apart.amin(-1), apart.amax(-1)
                        scale = ((high - low) / (2**bits - 1)).to(dtype)
                        zero = (-(2 ** (bits - 1)) - low / scale.float()).round()
                        zero = zero.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
                        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
                        kind = PackedQuantizationCompressor if packed else IntQuantizationCompressor
                        state = kind.compress(state, scheme)
                        name = f"{strategy}{bits}_{int(symmetric)}_{int(packed)}_{str(dtype)[6:]}"
                        stored |= {f"{name}.{k}": v for k, v in state.items()}
                        expected[f"{name}.weight"] = kind.decompress(state, scheme)["weight"]
    put("compressed_tensors", stored, expected)


class Recorded(Exception):  # noqa: N818
    """Carries the weight that a layer of auto-gptq multiplies with."""


def gptq(folder):
    """auto-gptq packs; its own forward dequantises on CPU. GPTQModel reads it as its version 2."""
    place = Path(importlib.util.find_spec("auto_gptq").origin).parent / "nn_modules/qlinear"
    found = importlib.util.spec_from_file_location("q", place / "qlinear_cuda_old.py")
    module = importlib.util.module_from_spec(found)  # the package itself needs accelerate
    found.loader.exec_module(module)
    QuantLinear = module.QuantLinear

    stored, expected, second = {}, {}, {}
    for bits in (2, 4, 8):
        for dtype in (torch.float16, torch.bfloat16):
            linear = torch.nn.Linear(64, 96, bias=True).to(dtype)
            layer = QuantLinear(bits, 16, 64, 96, True, weight_dtype=dtype)
            apart = linear.weight.float().reshape(96, 4, 16)
            low, high = apart.amin(-1), apart.amax(-1)
            scale = (high - low) / (2**bits - 1)
            zero = (-low / scale).round().clamp(1, 2**bits - 1)
            layer.pack(linear, scale.to(dtype), zero, None)
            name = f"b{bits}_{str(dtype)[6:]}"
            stored |= {f"{name}.{k}": v.clone() for k, v in layer.state_dict().items()}
            layer.bias = None
            kept = torch.matmul

            def record(x, weight):
                raise Recorded(weight)

            torch.matmul = record
            try:
                layer(torch.eye(64, dtype=dtype))
            except Recorded as found:
                (weight,) = found.args
            finally:
                torch.matmul = kept
            expected[f"{name}.weight"] = weight.T
            expected[f"{name}.bias"] = stored[f"{name}.bias"]
    put("gptq", stored, expected, {"quantization_config": {"bits": 4, "quant_method": "gptq"}})
    # The code of GPTQModel that dequantises, taken from its sources, on layers with an order.
    text = (folder / "gptqmodel/nn_modules/qlinear/__init__.py").read_text()
    dequantise = method(text, "dequantize_weight") + method(text, "_dequantize_from_codes")
    space = {"t": torch, "_torch_right_shift": torch.bitwise_right_shift}
    exec("class Layer:\n" + dequantise, space)  # noqa: S102
    for name in {x.rpartition(".")[0] for x in stored}:
        bits = int(name[1])
        layer = space["Layer"]()
        layer.planar, layer.bits, layer.pack_factor, layer.maxq = (
            False,
            bits,
            32 // bits,
            2**bits - 1,
        )
        layer._init_wf_unsqueeze_buffers = lambda: None
        shifts = torch.arange(0, 32, bits, dtype=torch.int32).reshape(1, -1)
        layer.wf_unsqueeze_zero, layer.wf_unsqueeze_neg_one = shifts[None], shifts[..., None]
        layer.dequant_dtype = torch.int16 if bits == 8 else torch.int8
        order = torch.from_numpy(np.random.default_rng(bits).permutation(64) // 16).int()
        values = {k: stored[f"{name}.{k}"] for k in ("qweight", "qzeros", "scales")} | {
            "g_idx": order
        }
        for key, value in values.items():
            setattr(layer, key, value)
            second[f"{name}.{key}"] = value
        layer.in_features = 64
        expected[f"{name}.weight"] = layer.dequantize_weight().T
    config = {"bits": 4, "quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    expected = {k: v for k, v in expected.items() if k.endswith("weight")}
    put("gptq_v2", second, expected, {"quantization_config": config})


def method(text, name):
    return re.search(rf"^    def {name}\(.*?(?=^    (def|@)|\Z)", text, re.DOTALL | re.MULTILINE)[0]


def awq(folder):
    found = importlib.util.spec_from_file_location("p", folder / "awq/utils/packing_utils.py")
    packing = importlib.util.module_from_spec(found)
    found.loader.exec_module(packing)
    text = (folder / "awq/modules/linear/gemm.py").read_text()
    space = {
        "torch": torch,
        "nn": torch.nn,
        "get_best_device": lambda: "cpu",
        "math": __import__("math"),
    }
    parts = method(text, "__init__"), "    @classmethod\n", method(text, "from_linear")
    exec("class Layer(nn.Module):\n" + "".join(parts), space)  # noqa: S102
    stored, expected = {}, {}
    for group in (16, 64):
        linear = torch.nn.Linear(64, 96, bias=True).half()
        apart = linear.weight.float().reshape(96, 64 // group, group)
        low, high = apart.amin(-1), apart.amax(-1)
        scale = ((high - low) / 15).half()
        zero = (-low / scale.float()).round().clamp(0, 15)
        layer = space["Layer"].from_linear(
            linear, 4, group, False, scale.T.contiguous(), zero.T.contiguous()
        )
        state = layer.state_dict()
        stored |= {f"g{group}.{k}": v for k, v in state.items()}
        expected[f"g{group}.weight"] = packing.dequantize_gemm(
            state["qweight"], state["qzeros"], state["scales"], 4, group
        ).T
        expected[f"g{group}.bias"] = state["bias"]
    put("awq", stored, expected)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    bitsandbytes()
    compressed_tensors()
    awq(Path(sys.argv[1]))
    gptq(Path(sys.argv[2]))
