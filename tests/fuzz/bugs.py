"""Bugs to plant in decoders and loaders. Each target must find those of its boundary within some hundred cases."""

from dataclasses import dataclass
from typing import Final

from tests.simulation.bugs import Bug


@dataclass(frozen=True)
class PlantedBug:
    """A bug, and the target that must find it."""

    target: str
    bug: Bug


def _bug(target: str, name: str, module: str, old: str, new: str) -> PlantedBug:
    return PlantedBug(target, Bug(name=name, module=module, old=old, new=new, invariants=()))


BUGS: Final = (
    _bug(
        "message",
        "a state may hold bytes and a thousand levels",
        "gspo_protocol.codec",
        "        message.check_plain()\n",
        "        pass\n",
    ),
    _bug(
        "message",
        "one of many chunks may have any state",
        "gspo_protocol.messages.gathered",
        "        chunk.check_plain()\n",
        "        pass\n",
    ),
    _bug(
        "message",
        "any log-prob of one of many chunks will do",
        "gspo_protocol.messages.gathered",
        "(logprobs >= limits.MIN_LOGPROB) & (logprobs <= MAX_LOGPROB) & (token_ids >= 0)",
        "token_ids >= 0",
    ),
    _bug(
        "stored_chunk",
        "the checksum leaves out the header",
        "gspo_services.broker.store.payload",
        "zlib.crc32(header, start)",
        "start",
    ),
    _bug(
        "weights",
        "a tensor's digest is not checked",
        "gspo_services.rollout.weights.replica",
        "if digest != tensors[index].digest:",
        "if False:",
    ),
    _bug(
        "weights",
        "a manifest gets the memory that it claims",
        "gspo_services.rollout.weights.fetch",
        "        landing = replica.landing(manifest)\n",
        "        bytearray(manifest.num_bytes)\n        landing = replica.landing(manifest)\n",
    ),
    _bug(
        "delta_streams",
        "a position may be outside of its bucket",
        "gspo_protocol.deltas",
        "if int(positions[-1]) >= bucket.num_elements:",
        "if False:",
    ),
    _bug(
        "delta",
        "a bucket may change a tensor that has no new digest",
        "gspo_services.rollout.weights.replica",
        "if not is_changed[index] and tensors[index].num_bytes:",
        "if False:",
    ),
    _bug(
        "delta",
        "a delta may lead to another version than its digest names",
        "gspo_services.rollout.weights.replica",
        "if version_digest(tensors) != delta.digest:",
        "if False:",
    ),
    _bug(
        "delta",
        "the engine is not told what a delta changed",
        "gspo_services.rollout.weights.replica",
        "self._unloaded |= head.tensors.keys()",
        "pass",
    ),
    _bug(
        "delta_chain",
        "a version that never arrived still counts as coming",
        "gspo_services.rollout.weights.fetch",
        "        replica.coming = 0",
        "        pass",
    ),
    _bug(
        "toml",
        "a setting may be a thousand levels deep",
        "gspo_services.shared.settings.configuration",
        "    if depth > MAX_DEPTH:\n",
        "    if False:\n",
    ),
    _bug(
        "stream",
        "an event that the end of the stream cut off still counts",
        "gspo_services.rollout.sglang.http",
        ' and line.endswith(b"\\n")',
        "",
    ),
    _bug(
        "output",
        "any number may be a log-prob",
        "gspo_services.rollout.sglang.generation",
        "if not possible.all():",
        "if False:",
    ),
    _bug(
        "action",
        "numbers have no bound",
        "gspo_services.tasks.environments.expression",
        "if abs(value) > MAX_RESULT:",
        "if False:",
    ),
    _bug(
        "ledger",
        "an unreadable row raises an undocumented error",
        "gspo_services.broker.store.reader",
        "        except (ValueError, TypeError, RecursionError) as error:\n"
        '            raise StoreCorrupt(f"{self.path}: a row',
        '        except ZeroDivisionError as error:\n            raise StoreCorrupt(f"{self.path}: a row',
    ),
    _bug(
        "checkpoint",
        "damaged metadata raises an undocumented error",
        "gspo_services.learner.checkpoints.format",
        "except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:",
        "except (OSError, AttributeError) as error:",
    ),
    _bug(
        "backup",
        "links are followed",
        "gspo_services.shared.runtime.foreign",
        "os.open(part, _FLAGS | flags,",
        "os.open(part, _FLAGS & ~os.O_NOFOLLOW | flags,",
    ),
    _bug(
        "foreign_name",
        "a name may lead upwards",
        "gspo_services.shared.runtime.foreign",
        'part in ("", ".", "..")',
        'part in ("", ".")',
    ),
)
