"""Bugs to be planted in decoders and loaders: each target must find those of its boundary within some hundred cases."""

from dataclasses import dataclass
from typing import Final

from tests.simulation.bugs import Bug


@dataclass(frozen=True)
class PlantedBug:
    """``target`` finds ``bug``."""

    target: str
    bug: Bug


def _bug(target: str, name: str, module: str, old: str, new: str) -> PlantedBug:
    return PlantedBug(target, Bug(name=name, module=module, old=old, new=new, invariants=()))


BUGS: Final = (
    _bug(
        "message",
        "a state may hold bytes and a thousand levels",
        "protocol.codec",
        "        message.check_plain()\n",
        "        pass\n",
    ),
    _bug(
        "stored_chunk",
        "the checksum leaves out the header",
        "services.broker.store.payload",
        "zlib.crc32(header)",
        "0",
    ),
    _bug(
        "weights",
        "a tensor's digest is not looked at",
        "services.rollout.weights.replica",
        "if digest != expected:",
        "if False:",
    ),
    _bug(
        "weights",
        "a manifest takes the memory that it names",
        "services.rollout.weights.fetch",
        "    data = bytearray()\n",
        "    data = bytearray(manifest.num_bytes)\n",
    ),
    _bug(
        "delta_streams",
        "a position may be outside of its bucket",
        "protocol.deltas",
        "if int(positions[-1]) >= bucket.num_elements:",
        "if False:",
    ),
    _bug(
        "delta",
        "a bucket may change a tensor of which no digest came",
        "services.rollout.weights.replica",
        "if not is_changed[index] and tensors[index].num_bytes:",
        "if False:",
    ),
    _bug(
        "delta",
        "a delta may lead to another version than its digest names",
        "services.rollout.weights.replica",
        "if version_digest(tensors) != delta.digest:",
        "if False:",
    ),
    _bug(
        "delta",
        "the engine is not told what a delta changed",
        "services.rollout.weights.replica",
        "self._unloaded |= digests.keys()",
        "pass",
    ),
    _bug(
        "delta_chain",
        "a version that did not come is still said to be coming",
        "services.rollout.weights.fetch",
        "        held.coming = 0",
        "        pass",
    ),
    _bug(
        "toml",
        "dates and thousands of levels are settings",
        "services.runtime.settings.configuration",
        "    require_plain(plain, origin)\n    try:",
        "    try:",
    ),
    _bug(
        "stream",
        "the limit of an event depends on how it is cut",
        "services.rollout.sglang.sse",
        'len(self._rest) - self._rest.endswith(b"\\n")',
        "len(self._rest)",
    ),
    _bug(
        "output",
        "any number is a log-prob",
        "services.rollout.sglang.generation",
        "if not (math.isfinite(logprob) and -MAX_FLOAT32 <= logprob <= MAX_LOGPROB):",
        "if False:",
    ),
    _bug("action", "numbers have no bound", "services.environments.expression", "if abs(value) > MAX_RESULT:", "if False:"),
    _bug(
        "ledger",
        "a row that cannot be read is an error of another kind",
        "services.broker.store.reader",
        "        except (ValueError, TypeError, RecursionError) as error:\n"
        '            raise StoreCorrupt(f"{self.path}: a row',
        '        except ZeroDivisionError as error:\n            raise StoreCorrupt(f"{self.path}: a row',
    ),
    _bug(
        "checkpoint",
        "the newest checkpoint may be anywhere",
        "services.learner.checkpoints.format",
        'if not name.startswith(PREFIX) or "/" in name or "\\0" in name or len(name) > 100:',
        "if False:",
    ),
)
