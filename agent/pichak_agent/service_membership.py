"""A service's part in its cluster: it knocks, starts Ray when the head answers, watches both, and
starts it again whenever it was lost. A head that is away is a state and no error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pichak_agent.ray_start import RayStart, joined, refusal, refused_token
from pichak_agent.ray_supervisor import RayNode
from pichak_agent.service_backoff import Backoff
from pichak_agent.service_files import ServiceError
from pichak_agent.service_knock import Knock
from pichak_agent.service_voice import Voice

#: Seconds between two knocks at the head's door while this node is in its cluster.
KNOCK_SECONDS = 5.0
#: ``ray start`` may take so long to join; on a busy machine it takes a minute.
JOIN_SECONDS = 180.0
#: A join that takes longer is told.
SLOW_JOIN_SECONDS = 12.0
#: What a person has to mend is tried again this often by a service that was in the cluster before.
REFUSED_SECONDS = 300.0
#: A node that stays up for so long has joined well.
SETTLED_SECONDS = 60.0
#: From SIGTERM to nothing left.
STOP_SECONDS = 8.0


class Membership:
    """From the first `look` to `stop`. `variables` go to everything that Ray starts here; `attend`
    is called while it waits for Ray's end; `objection`, when a head answers that is to be
    joined, says why it is not, "" where it may be."""

    def __init__(
        self,
        how: RayStart,
        variables: Mapping[str, str],
        voice: Voice,
        attend: Callable[[], None],
        objection: Callable[[], str],
        *,
        clock: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
    ) -> None:
        self._how, self._variables = how, variables
        self._voice, self._state = voice, voice.state
        self._attend, self._objection, self._clock = attend, objection, clock
        self._backoff = backoff or Backoff()
        self._node: RayNode | None = None
        self._next_try = self._next_knock = self._started_at = 0.0
        self._misses = 0
        self._knock: Knock | None = None

    def look(self) -> None:
        """See how things are and do the next step; to be called twice a second.

        `ServiceError` when the cluster refuses this node before it was ever in it.
        """
        if self._node is not None:
            self._look_at_node(self._node)
        elif self._clock() >= self._next_try:
            self._try_to_join()

    def stop(self) -> list[int]:
        """Leave the cluster; the processes that could not be ended."""
        if self._node is None:
            return []
        self._voice.enter("stopping", "stopping: ending the jobs and leaving the cluster")
        return self._node.stop(STOP_SECONDS)

    def _try_to_join(self) -> None:
        why = self._answer_of_head()
        if why is None:
            return
        if why:
            self._wait("waiting", f"{why}; waiting for it")
            return
        if refused := self._objection():
            self._refused(refused)
            return
        node = RayNode(self._how, self._variables)
        self._state.mark = node.mark
        try:
            node.start()
        except OSError as error:
            self._wait("waiting", f"Ray cannot be started here: {error}")
            return
        self._node, self._started_at = node, self._clock()
        self._state.folder = str(node.folder)
        self._voice.enter("joining", f"the head at {self._how.address} answers: joining it")

    def _look_at_node(self, node: RayNode) -> None:
        output = node.hear()
        lived = self._clock() - self._started_at
        if not node.running:
            self._lost(node, output)
        elif self._state.state == "joining":
            if joined(output):
                self._joined(node)
            elif refused_token(output):
                self._lost(node, output)
            elif lived > JOIN_SECONDS:
                self._lost(node, output, JOIN_SECONDS)
            elif lived > SLOW_JOIN_SECONDS:
                self._voice.tell(
                    "joining",
                    f"still joining the cluster at {self._how.address}: Ray starts its processes "
                    f"here and registers with the head, which may take {JOIN_SECONDS:g} s on a "
                    "busy machine",
                )
        else:
            if lived > SETTLED_SECONDS:
                self._backoff.reset()
            self._watch_head()

    def _joined(self, node: RayNode) -> None:
        facts = node.facts()
        self._state.joins += 1
        self._state.node_id = str(facts.get("node_id") or "")
        self._state.raylet_pid = int(str(facts.get("pid") or 0))
        self._misses, self._next_knock = 0, self._clock() + KNOCK_SECONDS
        self._voice.new_chapter()
        again = " again" if self._state.joins > 1 else ""
        self._voice.tell(
            "joined",
            f"in the cluster at {self._how.address}{again}, as node {self._state.node_id[:12]}",
        )

    def _watch_head(self) -> None:
        """Raylet and head hold on to each other for a while; the state says it earlier."""
        if self._clock() < self._next_knock:
            return
        why = self._answer_of_head()
        if why is None:
            return
        self._next_knock = self._clock() + KNOCK_SECONDS
        self._misses = self._misses + 1 if why else 0
        if self._misses == 2:
            self._voice.tell("away", f"{why}; this node keeps what it has and waits for it")
        elif not why and self._state.state == "away":
            self._voice.new_chapter()
            self._voice.tell("joined", f"the head at {self._how.address} answers again")

    def _answer_of_head(self) -> str | None:
        """None while it is waited for; each answer is given once."""
        if self._knock is None:
            self._knock = Knock(self._how.address)
        answer = self._knock.answer
        if answer is not None:
            self._knock = None
        return answer

    def _lost(self, node: RayNode, output: str, waited_seconds: float = 0.0) -> None:
        self._node = None
        said = refusal(
            output,
            self._how.address,
            node.exit_code,
            token_file=self._how.token_file,
            waited_seconds=waited_seconds,
        )
        node.stop(STOP_SECONDS, self._attend)
        self._state.node_id, self._state.raylet_pid = "", 0
        self._state.mark = self._state.folder = ""
        if said.settled:
            self._refused(said.sentence)
        else:
            again = "joining again" if self._state.joins else "trying again"
            self._wait("waiting", f"{said.sentence}; {again}")

    def _refused(self, why: str) -> None:
        if not self._state.joins:
            raise ServiceError(why)
        self._next_try = self._clock() + REFUSED_SECONDS
        self._voice.tell("refused", f"{why}; trying again every {REFUSED_SECONDS / 60:g} min")

    def _wait(self, state: str, why: str) -> None:
        self._next_try = self._clock() + self._backoff.wait()
        self._voice.tell(state, why)
