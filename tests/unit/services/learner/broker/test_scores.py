"""What a learner knows of evaluations."""

from gspo_protocol.messages import Evaluated, VersionScore
from gspo_services.learner.broker.port import updated_scores


def test_a_score_is_unknown_while_its_version_is_evaluated_and_gone_if_no_task_finished() -> None:
    begun = updated_scores({1: 0.5}, Evaluated(scores=[VersionScore(2, True, None), VersionScore(3, True, None)]))
    assert begun == {1: 0.5, 2: None, 3: None}
    news = [VersionScore(2, False, 0.75), VersionScore(3, False, None), VersionScore(4, False, None)]
    ended = updated_scores(begun, Evaluated(scores=news))
    assert ended == {1: 0.5, 2: 0.75}
    assert begun == {1: 0.5, 2: None, 3: None}, "the training thread may read it meanwhile"
