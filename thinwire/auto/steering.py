"""Steering: which method a handle uses, and how that changes: by its user, by a pilot, with an optimizer's momentum."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from thinwire.auto.council import Council
from thinwire.auto.memo import Memo
from thinwire.auto.onlooker import Onlooker
from thinwire.auto.pilot import Pilot
from thinwire.auto.prospect import OWNERS, Prospect
from thinwire.engine.assignments import MOMENTUM
from thinwire.errors import UsageError
from thinwire.memory.adam import SECOND_MOMENT
from thinwire.methods.base import ADAM_TAKEOVER, MOMENTUM_TAKEOVER, Adaptive, Dense, Method
from thinwire.optim.base import Takeover
from thinwire.plan.advice import Advice
from thinwire.plan.candidates import DENSE
from thinwire.plan.policy import DEFAULT, ON_SHARD, Rule, SlotPlan

if TYPE_CHECKING:
    from thinwire.handle import Handle

logger = logging.getLogger(__name__)

NOT_MEASURED = (
    "Nothing has been measured under this method yet: call handle.measure() on every rank at the same step, train on for some "
    "twenty steps, and ask again."
)

CLOSED = "The handle is closed: gradients are averaged as by plain DDP."

FORGOTTEN = (
    "The state has nothing of what was held back: a distributed load reads only what a handle has room for, and one that begins dense, "
    "as with tw.Auto() and tw.AdamScale, has none. handle.load_checkpoint(path) reads all of it."
)

NOT_TAKEN_OVER = (
    "The state was saved with the optimizer's %s in the handle's hands, and there is no optimizer here that it could be given back to: "
    "it is dropped, and what was held back is sent as plain gradient. Attach with optimizer=, of the kind that it was."
)


class Steering:
    """One handle's. `method` and `policy` are its user's choice, a `takeover` is what an optimizer has handed over for them.

    The `prospect` of an optimizer tells what can be taken over later.
    """

    def __init__(
        self,
        handle: Handle,
        method: Method,
        policy: Sequence[Rule],
        takeover: Takeover | None,
        prospect: Prospect,
    ) -> None:
        self.pilot: Pilot | None = None
        """Steers where the method chooses for itself."""
        self._onlooker: Onlooker | None = None
        """Measures where the method is what it is, if the user asks for it."""
        self._handle = handle
        self._asked = method
        """The user's own."""
        self._method = method
        self._policy = list(policy)
        """The user's own rules."""
        self._rules = list(policy)
        """The rules in force; a pilot adds its own."""
        self.takeover = takeover
        """What was taken over from the optimizer; None while it works alone."""
        self._prospect = prospect
        self._next: tuple[Method, list[Rule]] | None = None
        """What comes when momentum has changed hands, which takes a dense step."""
        handle.reducer.before_step.append(self._finish_switch)
        self._start_pilot(method)

    def settings(self) -> tuple[Method, list[Rule]]:
        """What the reducer runs: the method and the rules, with what was taken over in them; dense while momentum is to
        change hands."""
        if self._next is not None:
            return bind(Dense(), [], self.takeover)
        return bind(self._method, self._rules, self.takeover)

    def begin_move(self) -> tuple[Method, list[Rule]]:
        """What the reducer among other ranks begins with. What a pilot decided for the old ones is void: it starts dense.

        With momentum in the handle's hands that waits for `follow_move`: only the method in force has a place for it.
        """
        self._dismiss_onlooker()
        if self.pilot is not None and self.takeover is None:
            self._method = self._asked
            self._rules, self._next = list(self._policy), None
        return bind(self._method, self._rules, self.takeover)

    def rebind(self) -> None:
        """The takeover binds the method in another way from now on, on all ranks alike."""
        self._handle.reducer.follow(*self.settings())

    def follow_move(self) -> None:
        """The handle has another reducer, among other ranks."""
        reducer = self._handle.reducer
        reducer.before_step.append(self._finish_switch)
        if self.pilot is not None:
            if self.takeover is not None:
                self._method, self._rules, self._next = Dense(), list(self._policy), None
                reducer.switch(*self.settings())
            self._begin(self.pilot.adaptive)
        elif self._next is not None:
            # The dense step that momentum waits for is still to come.
            reducer.switch(*self.settings())

    # -- the user ------------------------------------------------------------------------------------------------

    def switch(self, method: Method, policy: Sequence[Rule] | None) -> None:
        """Use another method from the next step on."""
        rules = self._policy if policy is None else list(policy)
        # Whoever steers or measures goes on if this is refused.
        self._apply(method, rules)
        if self.pilot is not None:
            self.pilot.retire()
            self.pilot = None
        self._dismiss_onlooker()
        self._asked, self._policy = method, rules
        self._start_pilot(method)

    def _apply(self, method: Method, rules: Sequence[Rule]) -> bool:
        """Use another method from this step on; False if momentum has to change hands first, which takes a dense step."""
        reducer = self._handle.reducer
        methods = [method, *(rule.method for rule in rules if rule.method)]
        wanted, taken = whose_momentum(methods), self.takeover is not None
        if wanted is None or wanted == taken or not self._can_change_hands():
            reducer.switch(*bind(method, rules, self.takeover))
            self._method, self._rules, self._next = method, list(rules), None
            if self.takeover is not None:
                self.takeover.follow_switch(self._handle)
            return True
        if not taken:
            # Whatever cannot be taken over is refused now.
            self._prospect.take_over(find_owner(methods))
        self._next = (method, list(rules))
        if reducer.assignments.hold_nothing_back:
            self._change_hands()
            return True
        reducer.switch(*self.settings())
        return False

    # -- a pilot -------------------------------------------------------------------------------------------------

    def _start_pilot(self, method: Method) -> None:
        """Have a method that chooses for itself do so from the next step on; other methods are what they are."""
        if method.adaptive is None:
            return
        if self._handle.reducer.driver.network is None:
            raise UsageError(
                f"method is {type(method).__name__}, which measures a link; simulated workers have none, so name a method"
            )
        self._begin(method.adaptive)

    def _begin(self, adaptive: Adaptive) -> None:
        reducer = self._handle.reducer
        candidates = self._prospect.candidates(adaptive, self._handle.world)
        council = self._council()
        assert council is not None
        find_objection = self._prospect.find_objection
        self.pilot = Pilot(adaptive, candidates, reducer, council, self._try_apply, find_objection)

    def _council(self) -> Council | None:
        """All ranks that have to be of one mind; None where workers are simulated."""
        network = self._handle.reducer.driver.network
        if network is None:
            return None
        return Council(network.group, network.place, self._handle.beside)

    def _try_apply(self, method: Method, rules: Sequence[Rule]) -> bool:
        """The pilot's way to switch: the user's own rules come first."""
        wanted = (method, [*self._policy, *rules])
        if self._next is not None and self._next == wanted:
            return False
        return self._apply(*wanted)

    # -- somebody who looks on -----------------------------------------------------------------------------------

    def measure(self, steps: int, quality: str) -> None:
        """Measure the next steps under the method in force, on all ranks."""
        reducer, world = self._handle.reducer, self._handle.world
        council = self._council()
        if self.pilot is not None or council is None:
            raise UsageError(
                "measure() is for methods that do not measure by themselves, on workers that have a link: tw.Auto() does, and "
                "simulated workers have none"
            )
        self._dismiss_onlooker()
        candidates = self._prospect.candidates(Adaptive(quality=quality), world)
        present = self._prospect.find_present(self._method.at(reducer.step), world)
        self._onlooker = Onlooker(reducer, council, candidates, present, steps)

    def advise(self) -> Advice:
        if self._handle.closed:
            return Advice((), (CLOSED,))
        if self.pilot is not None:
            return self.pilot.advise()
        if self._onlooker is not None:
            return self._onlooker.advise()
        return Advice((), (NOT_MEASURED,), settled=False)

    def explain(self, plan: SlotPlan) -> str:
        """Why that happens to a parameter; what a pilot decided, and its user never asked for, is told as that."""
        own = {f"by {rule}" for rule in self._policy}
        asked, on, where = plan.reason.partition(ON_SHARD)
        if self.pilot is None or asked in own or not asked.startswith((DEFAULT, "by rule(")):
            return plan.reason
        return f"{self.pilot.says}{on}{where}"

    def _dismiss_onlooker(self) -> None:
        if self._onlooker is not None:
            self._onlooker.retire()
            self._onlooker = None

    # -- an optimizer's momentum ---------------------------------------------------------------------------------

    def _can_change_hands(self) -> bool:
        """Whether the optimizer is known, and can go on by itself where it has been in other hands."""
        if self.takeover is not None:
            return self.takeover.can_give_back
        return self._prospect.optimizer is not None

    def _finish_switch(self, step: int) -> None:
        """A dense step has sent all that was held back: momentum can change hands."""
        if self._next is not None and self._handle.reducer.assignments.hold_nothing_back:
            self._change_hands()

    def give_back(self) -> bool:
        """Hand momentum back for good if it is the same on all ranks, as it is when all is dense; False if it is not, or none was taken."""
        taken = self.takeover
        if taken is None or not taken.can_give_back:
            return False
        if not self._handle.reducer.assignments.hold_nothing_back:
            return False
        taken.give_back()
        self._forget_takeover()
        return True

    def _forget_takeover(self) -> None:
        taken, replicas = self.takeover, self._handle.reducer.replicas
        if replicas is not None and taken in replicas.followers:
            replicas.followers.remove(taken)
        self.takeover = None

    def _change_hands(self) -> None:
        assert self._next is not None
        (method, rules), self._next = self._next, None
        self._method, self._rules = method, rules
        if self.takeover is not None:
            self.takeover.give_back()
            self._forget_takeover()
            self._handle.reducer.switch(method, rules)
            return
        self._take_over(find_owner([method, *(rule.method for rule in rules if rule.method)]))

    def _take_over(self, owner: Method) -> None:
        """What `owner` needs of the optimizer, and put the settings in force that have it."""
        reducer = self._handle.reducer
        self.takeover = taken = self._prospect.take_over(owner)
        assert taken is not None
        reducer.switch(*self.settings())
        taken.commit([self._handle])
        if reducer.replicas is not None:
            reducer.replicas.followers.append(taken)

    # -- saving it -----------------------------------------------------------------------------------------------

    def save_into(self, content: dict[str, Any]) -> None:
        """Add what of the handle's state is not its reducer's."""
        if self.takeover is not None:
            content["memory"] |= self.takeover.stores()
            numbers = self.takeover.numbers()
            content |= {"takeover": numbers} if numbers else {}
        if self.pilot is not None:
            content["auto"] = self.pilot.state()

    def before_load(self, content: dict[str, Any], *, reset: bool) -> None:
        """The reducer is about to load its state out of this content; with `reset` memory is left out on purpose."""
        memo = Memo.from_json(content["auto"]) if "auto" in content else None
        if self.pilot is not None:
            holds = find_takeover(content["memory"])
            decided = self.pilot.load(memo)
            if decided is not None:
                method, rules = decided
                self._put_in_force(method, [*self._policy, *rules], holds)
            elif holds is not None and self._prospect.lets_take_over(holds):
                # What has a place for all of it, until `after_load` has it sent.
                self._put_in_force(OWNERS[holds], [Rule(method=OWNERS[holds])], holds)
            else:
                if holds is not None:
                    logger.warning(NOT_TAKEN_OVER, holds)
                self._put_in_force(Dense(), self._policy, None)
        if self.takeover is not None:
            self.takeover.before_load(self._handle, content.get("takeover", {}))
        if not reset and not any(content["memory"].values()) and self._held_back(content, memo):
            logger.warning(FORGOTTEN)

    def _put_in_force(self, method: Method, rules: Sequence[Rule], holds: str | None) -> None:
        """Use a method at once: all that is held is about to be replaced by a state that `holds` what was taken over."""
        reducer = self._handle.reducer
        reducer.release()
        reducer.assignments.stop_flushes()
        methods = [method, *(rule.method for rule in rules if rule.method)]
        owned = whose_momentum(methods)
        if owned is None and holds is not None:
            # A plain mean works either way.
            owned = True
            methods = [OWNERS[holds]]
        self._method, self._rules, self._next = method, list(rules), None
        if owned and self.takeover is None:
            self._take_over(find_owner(methods))
            return
        if not owned and self.takeover is not None:
            self.takeover.step_back()
            self._forget_takeover()
        reducer.switch(*self.settings())

    def _held_back(self, content: dict[str, Any], memo: Memo | None) -> bool:
        """Whether something was held back when this content was saved, by what was decided before."""
        candidates = {} if self.pilot is None else self.pilot.candidates
        # bfloat16, too, holds nothing back.
        dense = {DENSE, *(label for label, one in candidates.items() if one.method.is_dense)}
        if memo is not None and not dense.issuperset(memo.labels):
            return True
        since = content.get("takeover", {}).get("since")
        return since is not None and int(since) < int(content.get("step", 0))

    def after_load(self, content: dict[str, Any]) -> None:
        if self.takeover is None:
            return
        self.takeover.after_load(self._handle, content["memory"])
        if self.pilot is not None and not self.pilot.labels:
            # It begins with what the optimizer does alone.
            self._next = (Dense(), list(self._policy))
            self._handle.reducer.switch(*self.settings())


def find_takeover(memory: Mapping[str, Mapping[str, Tensor]]) -> str | None:
    """What had been taken over from an optimizer when this memory was saved, by its name in `thinwire.optim`; None = nothing."""
    held = {store for store, contents in memory.items() if contents}
    if SECOND_MOMENT in held:
        return ADAM_TAKEOVER
    return MOMENTUM_TAKEOVER if MOMENTUM in held else None


def whose_momentum(methods: Sequence[Method]) -> bool | None:
    """Whether these methods do a part of the optimizer's work; None where they work either way, as plain means do."""
    if any(method.takes_over is not None for method in methods):
        return True
    if all(method.is_dense or method.adaptive is not None for method in methods):
        return None
    return False


def find_owner(methods: Sequence[Method]) -> Method:
    """The first that does a part of the optimizer's work."""
    return next(method for method in methods if method.takes_over is not None)


def bind(
    method: Method, policy: Sequence[Rule], takeover: Takeover | None
) -> tuple[Method, list[Rule]]:
    """The settings with what was taken over from the optimizer in them."""
    if takeover is not None:
        if method.adaptive is not None and method.takes_over is None:
            # It begins dense, and whoever it chooses then has momentum change hands if need be.
            method = Dense()
        return takeover.bind(method), takeover.bind_policy(policy)
    if method.takes_over is not None:
        raise UsageError(
            f"method is {type(method).__name__}, which takes momentum over from the optimizer; attach with it and "
            "optimizer=opt instead of switching to it"
        )
    return method, list(policy)
