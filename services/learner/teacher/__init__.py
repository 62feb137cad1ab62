"""A teacher that is a server: asked, without torch, for the log-probs of each sequence of a run once."""

from gspo_services.learner.teacher.client import RefusedSequenceError, TeacherError, TeacherServer, require_same_texts
from gspo_services.learner.teacher.record import ScoreRecord, key_of

__all__ = ["RefusedSequenceError", "ScoreRecord", "TeacherError", "TeacherServer", "key_of", "require_same_texts"]
