"""The protobuf messages of Tinker's client, by their field numbers (client 0.38.0). Made here, so that nothing is generated.

A field is "name number type"; "*" repeats it, "?" tells an absent one from an empty one, "map" has text keys. Fields that
this service does not read, and messages of images and sound, are left out: protobuf keeps what it does not know.
"""

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

FLOAT32: Final = 1
INT64: Final = 2
INT32: Final = 3
STOPPED: Final = 0
TOO_LONG: Final = 1
"""Values of enumerations, which are plain numbers on the wire."""

_PACKAGE: Final = "gspo.serve"
_KINDS: Final = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "text": 9, "bytes": 12, "uint32": 13}
_MESSAGE: Final = 11
_MESSAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "SparseCsr": ("values 1 bytes", "crow_indices 2 bytes", "col_indices 3 bytes"),
    "Tensor": ("dense 1 bytes?", "sparse_csr 2 SparseCsr", "dtype 3 int32", "shape 4 int64*"),
    "EncodedTextChunk": ("tokens 1 bytes",),
    "Chunk": ("encoded_text 1 EncodedTextChunk",),
    "LossConfigValue": ("number 1 double?", "text 2 text?"),
    "Datum": ("model_input 1 Chunk*", "loss_fn_inputs 2 map Tensor"),
    "ForwardBackwardRequest": (
        "model_id 1 text", "seq_id 2 int32", "data 3 Datum*", "loss_fn 4 text", "loss_fn_config 5 map double",
        "forward_only 6 bool", "loss_fn_config_v2 7 map LossConfigValue",
    ),
    "BatchedTensor": ("data 1 bytes", "offsets 2 bytes", "dtype 3 int32", "trailing_shape 4 int64*"),
    "ArrayRecord": ("type_tag 1 text", "fields 2 map BatchedTensor", "num_datums 3 int64"),
    "ForwardBackwardOutput": ("loss_fn_output_type 1 text", "loss_fn_outputs 2 ArrayRecord*", "metrics 3 map double"),
    "TopkLogprobs": ("token_ids 1 bytes", "logprobs 2 bytes", "k 3 uint32", "length 4 uint32"),
    "SampledSequence": (
        "stop_reason 1 int32", "tokens 2 bytes", "logprobs 3 bytes?", "topk_sampled_logprobs 4 TopkLogprobs",
    ),
    "SampleResponse": (
        "sequences 1 SampledSequence*", "prompt_logprobs 2 bytes?", "topk_prompt_logprobs 3 TopkLogprobs",
    ),
}  # fmt: skip


def _add_field(message: Any, line: str) -> None:
    name, number, *words = line.split()
    kind = words[-1].rstrip("*?")
    field = message.field.add(name=name, number=int(number), label=3 if words[-1].endswith("*") or len(words) > 1 else 1)
    if len(words) > 1:
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add_field(entry, "key 1 text")
        _add_field(entry, f"value 2 {kind}")
        field.type, field.type_name = _MESSAGE, f".{_PACKAGE}.{message.name}.{entry_name}"
    elif kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = _MESSAGE, f".{_PACKAGE}.{kind}"
    if words[-1].endswith("?"):
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="gspo/serve.proto", package=_PACKAGE, syntax="proto3")
    for name, lines in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in lines:
            _add_field(message, line)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


_CLASSES: Final = _classes()
ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]
