"""``gspo view``: a page in the browser that shows what one or several runs have recorded, live or afterwards."""

from gspo_services.runs.view.learner_numbers import LearnerNumbers
from gspo_services.runs.view.page_answers import PageAnswers
from gspo_services.runs.view.server import ViewServer, serve_until
from gspo_services.runs.view.watched_run import WatchedRun, watched_runs

__all__ = ["LearnerNumbers", "PageAnswers", "ViewServer", "WatchedRun", "serve_until", "watched_runs"]
