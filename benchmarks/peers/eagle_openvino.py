"""Writes the IRs with which OpenVINO GenAI decodes by EAGLE-3. Runs in its environment; imports nothing of Outpace.

    python eagle_openvino.py MODEL.gguf DRAFTER.npz FOLDER      # DRAFTER.npz: of eagle.py

FOLDER/target is the GGUF file's own graph with one output more, last_hidden_state: fc of the hidden layers' outputs.
FOLDER/draft has the drafter. GenAI gives it the target's embedding, and takes away the first matrix that its hidden
states meet, which it takes for fc: both have stand-ins here. Weights are float16, faster here than 8 or 4 bits; the
head's are 8 bits, which are the target's own where it has Q8_0.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino import opset13 as op
from openvino.op.util import Variable, VariableInfo

BLOCK = 32
LAST = 2**63 - 1
MASKED = -65504.0


def ints(*values: int) -> Any:
    return op.constant(np.array(values, np.int64))


def floats(values: Any) -> Any:
    return op.constant(np.array(values, np.float32))


def matrix(weight: Any) -> Any:
    return op.convert(op.constant(weight.astype(np.float16)), "f32")


def bytes_of(weight: Any) -> Any:
    """A matrix of 8 bits in the form that OpenVINO keeps compressed."""
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    scale = np.maximum(np.abs(blocks).max(-1, keepdims=True) / 127, 1e-8).astype(np.float16)
    values = (np.round(blocks / scale.astype(np.float32)).clip(-127, 127) + 128).astype(np.uint8)
    zero = op.convert(op.constant(np.full_like(scale, 128, np.uint8)), "f16")
    found = op.multiply(op.subtract(op.convert(op.constant(values), "f16"), zero), op.constant(scale))
    return op.convert(op.reshape(found, ints(*weight.shape), False), "f32")


def linear(x: Any, weight: Any) -> Any:
    return op.matmul(x, weight, False, True)


def norm(x: Any, weight: Any, eps: float) -> Any:
    mean = op.reduce_mean(op.power(x, floats([[[2.0]]])), ints(-1), keep_dims=True)
    scale = op.divide(floats(1.0), op.sqrt(op.add(mean, floats([[[eps]]]))))
    return op.multiply(op.multiply(scale, x), floats(weight.reshape(1, 1, -1)))


def result(value: Any, name: str) -> Any:
    found = op.result(value, name=name)
    found.output(0).set_names({name})
    return found


def target(path: Path, config: dict[str, Any], tensors: Any) -> Any:
    """The graph that GenAI made of the GGUF file, with the output that the drafter reads."""
    model = openvino.Core().read_model(path)
    nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}
    names = [f"model.layers.self_attn.add1.layer{i}" for i in config["hidden_layers"]]
    if missing := [name for name in names if name not in nodes]:
        sys.exit(f"OpenVINO's graph of the target has no node {missing[0]}")
    states, eps = [nodes[name].output(0) for name in names], config["decoder"]["eps"]
    if config["fc_norm"]:
        states = [norm(state, tensors[f"fc_norm.{i}.weight"], eps) for i, state in enumerate(states)]
    fused = op.concat(states, -1)
    if config["norm_before_fc"]:
        fused = norm(fused, tensors["input_norm.weight"], eps)
    model.add_results([result(linear(fused, matrix(tensors["fc.weight"])), "last_hidden_state")])
    model.validate_nodes_and_infer_types()
    return model


def draft(config: dict[str, Any], tensors: Any) -> Any:
    shape = config["decoder"]
    hidden, heads, kv_heads, size, eps = (shape[key] for key in ("hidden", "heads", "kv_heads", "head_dim", "eps"))
    inputs = [
        op.parameter(openvino.PartialShape(sizes), kind, name=name)
        for name, sizes, kind in (
            ("input_ids", [-1, -1], openvino.Type.i64),
            ("hidden_states", [-1, -1, hidden], openvino.Type.f32),
            ("attention_mask", [-1, -1], openvino.Type.i64),
            ("position_ids", [-1, -1], openvino.Type.i64),
            ("beam_idx", [-1], openvino.Type.i32),
        )
    ]
    for given in inputs:
        given.output(0).set_names({given.get_friendly_name()})
    ids, states, mask, positions, beam = inputs
    rows = op.gather(op.shape_of(ids), ints(0), ints(0))
    swap = ints(0, 2, 1, 3)

    def weight(name: str) -> Any:
        return tensors[f"layers.0.{name}.weight"]

    def layer(x: Any, name: str) -> Any:
        return linear(x, matrix(weight(name)))

    def split(x: Any, count: int) -> Any:
        return op.transpose(op.reshape(x, ints(0, 0, count, size), True), swap)

    def rotated(x: Any) -> Any:
        """In the form that OpenVINO fuses."""
        low = op.slice(x, ints(0), ints(size // 2), ints(1), ints(3))
        high = op.slice(x, ints(size // 2), ints(LAST), ints(1), ints(3))
        return op.add(
            op.multiply(x, cos), op.multiply(op.concat([op.multiply(high, floats([[[[-1.0]]]])), low], -1), sin)
        )

    def cached(new: Any, name: str) -> tuple[Any, Any]:
        """What was there and ``new``, for every query head, and the node that keeps it."""
        info = VariableInfo()
        info.data_shape, info.data_type = openvino.PartialShape([-1, kv_heads, -1, size]), openvino.Type.f32
        info.variable_id = f"past_key_values.0.{name}present.0.{name}"
        variable = Variable(info)
        empty = op.broadcast(floats(0.0), op.concat([rows, ints(kv_heads), ints(0), ints(size)], 0))
        both = op.concat([op.gather(op.read_value(empty, variable), beam, op.constant(np.int64(0))), new], 2)
        sizes = op.concat([rows, ints(kv_heads, heads // kv_heads, 0, size)], 0)
        spread = op.broadcast(op.unsqueeze(both, ints(2)), sizes, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(spread, ints(0, heads, -1, size), True), op.assign(both, variable)

    stand_in = op.convert(op.constant(np.zeros((config["vocab"], hidden), np.float16)), "f32")
    embedded = op.gather(stand_in, op.convert(ids, "i32"), op.constant(np.int32(0)))
    g = linear(states, floats(np.eye(hidden)))  # a stand-in, too
    normed = norm(g, weight("hidden_norm"), eps)
    x = op.concat([norm(embedded, weight("input_layernorm"), eps), normed], -1)
    turns = floats((shape["rope_theta"] ** (-np.arange(0, size, 2) / size)).reshape(1, -1, 1))
    turns = op.broadcast(turns, op.concat([rows, ints(1, 1)], 0), broadcast_spec="BIDIRECTIONAL")
    angles = op.matmul(turns, op.convert(op.unsqueeze(positions, ints(1)), "f32"), False, False)
    angles = op.transpose(angles, ints(0, 2, 1))
    angles = op.concat([angles, angles], -1)
    cos, sin = op.unsqueeze(op.cos(angles), ints(1)), op.unsqueeze(op.sin(angles), ints(1))
    query = rotated(split(layer(x, "self_attn.q_proj"), heads))
    key, keep_key = cached(rotated(split(layer(x, "self_attn.k_proj"), kv_heads)), "key")
    value, keep_value = cached(split(layer(x, "self_attn.v_proj"), kv_heads), "value")
    hides = op.subtract(floats(1.0), op.unsqueeze(op.convert(mask, "f32"), ints(1, 2)))
    mixed = op.scaled_dot_product_attention(query, key, value, op.multiply(hides, floats(MASKED)), causal=False)
    mixed = op.reshape(op.transpose(mixed, swap), ints(0, 0, heads * size), True)
    residual = normed if config["norm_before_residual"] else g
    x = op.add(residual, layer(mixed, "self_attn.o_proj"))
    y = norm(x, weight("post_attention_layernorm"), eps)
    y = op.multiply(op.swish(layer(y, "mlp.gate_proj")), layer(y, "mlp.up_proj"))
    x = op.add(x, layer(y, "mlp.down_proj"))
    out = norm(x, tensors["norm.weight"], eps)
    offsets = op.constant(tensors["d2t"])
    offsets.set_friendly_name("d2t")
    outputs = [
        result(linear(out, bytes_of(tensors["lm_head.weight"])), "logits"),
        result(out if config["norm_output"] else x, "last_hidden_state"),
        result(offsets, "d2t"),
    ]
    model = openvino.Model(outputs, [keep_key, keep_value], inputs, "eagle3")
    model.set_rt_info(True, ["eagle3_mode"])
    model.set_rt_info(config["hidden_layers"], ["hidden_layers_list"])
    return model


def main() -> None:
    path, arrays, folder = map(Path, sys.argv[1:])
    tensors = dict(np.load(arrays))
    config = json.loads(str(tensors["config"]))
    read = folder.with_name("read")  # where GenAI writes the graph beside a link to the file, and the tokenizer
    read.mkdir()
    (read / "model.gguf").symlink_to(path.resolve())
    openvino_genai.LLMPipeline(str(read / "model.gguf"), "CPU", INFERENCE_NUM_THREADS=2, enable_save_ov_model=True)
    models = {"target": target(read / "openvino_model.xml", config, tensors), "draft": draft(config, tensors)}
    for name, model in models.items():
        (folder / name).mkdir(parents=True)
        openvino.save_model(model, folder / name / "openvino_model.xml", compress_to_fp16=False)
        for file in read.glob("openvino_*tokenizer.*"):
            shutil.copy(file, folder / name)


if __name__ == "__main__":
    main()
