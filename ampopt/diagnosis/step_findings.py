"""Faults of the user's own training step, by what was seen of a few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampopt.diagnosis.finding import Finding
from ampopt.diagnosis.step_seen import Update, WatchedSteps
from ampopt.diagnosis.training import ONCE, YOURS, TrainingCase
from ampopt.diagnosis.training_step import RATE, sgd

NAMED = 3


def repeated_updates(case: TrainingCase) -> Iterator[Finding]:
    """A batch's gradients are applied twice, as by `optimizer.step()` after `scaler.step(optimizer)`.

    Executed: the step without the second update.
    """
    updates = case.steps.updates if case.steps else []
    for at, second in enumerate(updates):
        earlier = [each for each in updates[:at] if each.place and each.weights & second.weights]
        first = earlier[-1] if earlier else None
        if second.refused_by:
            says = (
                f"{second.place} updates the weights with gradients that {second.refused_by} has refused "
                "because they overflow, and else has applied already"
            )
            places = (second.place, second.refused_by)
        elif not second.is_fresh and first is not None:
            says = f"{second.place} applies the gradients again that {first.place} has applied"
            says += _far(first, second)
            places = (second.place, first.place)
        else:
            continue
        ran = case.compared("with one update for each backward pass", YOURS, ONCE)
        by_scaler = second.refused_by or (first is not None and first.by_scaler)
        yield Finding(
            "repeated-update",
            says,
            places,
            "remove it: scaler.step(optimizer) calls optimizer.step()" if by_scaler else "remove one of them",
            lane=YOURS,
            is_fault=True,
            counterfactual=None if ran is None or ran.gain.is_vague else ran,
        )
        return


def _far(first: Update, second: Update) -> str:
    if not first.moved:
        return ""
    return f", and moves the weights {second.moved / first.moved:.0%} as far again"


def scaled_gradients(case: TrainingCase) -> Iterator[Finding]:
    """An update with gradients of a scaled loss, which `optimizer.step()` does not divide."""
    updates = case.steps.updates if case.steps else []
    wrong = next((update for update in updates if update.is_scaled), None)
    if wrong is not None:
        yield Finding(
            "scaled-gradients",
            f"{wrong.place} updates the weights with gradients of the scaled loss",
            (wrong.place,),
            "scaler.step(optimizer) in its place: it divides by the scale first",
            lane=YOURS,
            is_fault=True,
        )


def stale_gradients(case: TrainingCase) -> Iterator[Finding]:
    """Gradients that are never reset add up over all batches.

    Beside an optimizer's updates those by hand need not be by gradients: an average, a projection.
    """
    updates = case.steps.updates if case.steps else []
    is_by_hand = all(update.by_hand for update in updates)
    stale = [update for update in updates if update.is_stale and update.by_hand == is_by_hand]
    if stale:
        same = [update for update in updates if update.weights == stale[-1].weights]
        first, number = same[0], 1 + max(at for at, update in enumerate(same) if update.is_stale)
        ratio = stale[-1].moved / first.moved if first.moved and not first.is_stale else 0.0
        moves = f": update {number} moves the weights {ratio:.1f} times as far as the first"
        yield Finding(
            "stale-gradients",
            "the gradients of a batch are added to those of the batches before it"
            + (moves if ratio > 1 else ""),
            (stale[0].place,) if stale[0].place else (),
            "optimizer.zero_grad() before each backward pass (or after each update)",
            lane=YOURS,
            is_fault=True,
        )


def clipped_scaled_gradients(case: TrainingCase) -> Iterator[Finding]:
    """Gradients of a scaled loss that are limited before `GradScaler` divides them."""
    clip = case.steps.clipped if case.steps else None
    if clip is not None:
        yield Finding(
            "clipped-scaled-gradients",
            f"{clip.place} limits gradients that are {clip.scale:g} times the true ones: its limit of "
            f"{clip.limit:g} is one of {clip.limit / clip.scale:.2g} for these",
            (clip.place,),
            "scaler.unscale_(optimizer) before it",
            lane=YOURS,
            is_fault=True,
        )


def no_scaler_update(case: TrainingCase) -> Iterator[Finding]:
    """A step that fails the second time, because `GradScaler` was not updated after the first."""
    seen = case.steps
    if seen is not None and seen.lacks_scaler_update:
        yield Finding(
            "no-scaler-update",
            f"call {seen.calls} of the step fails, because no scaler.update() came before it: {seen.error}",
            (seen.failed_at,) if seen.failed_at else (),
            "scaler.update() after scaler.step(optimizer), in each step",
            lane=YOURS,
            is_fault=True,
        )


def no_update(case: TrainingCase) -> Iterator[Finding]:
    """Steps that do not move the weights, and why; and weights that never get a gradient."""
    seen = case.steps
    if seen is None or seen.is_functional or seen.lacks_scaler_update:
        return
    if seen.reset:
        place = seen.reset[0]
        says = "the gradients are reset between the backward pass and the update"
        yield _still(f"{says}: {place} finds none" if place else says, _BACKWARD_THEN_STEP, place)
    elif not seen.moves:
        yield from _standstill(case, seen)
    elif seen.unused:
        names = seen.unused
        case.notes.append(f"{len(names)} weights of the optimizer never get a gradient: {_few(names)}")


_BACKWARD_THEN_STEP = "optimizer.zero_grad(), then loss.backward(), then optimizer.step()"


def _standstill(case: TrainingCase, seen: WatchedSteps) -> Iterator[Finding]:
    """Why no call has moved the weights; a note where that is meant so, or where the optimizer is ours."""
    same = f"no step moves the weights in {seen.calls} calls"
    place = next((update.place for update in seen.updates), "")
    if not seen.has_gradients:
        yield _still(f"{same}: no backward pass brings gradients to them", _BACKWARD_THEN_STEP)
    elif seen.refused_at:
        says = f"{same}: {seen.refused_at} refuses their gradients, because they overflow"
        advice = (
            "look for infinity and NaN in the loss; a smaller init_scale of GradScaler finds its scale sooner"
        )
        yield _still(says, advice, seen.refused_at)
    elif not (seen.updates or seen.idle) and seen.adds_up:
        case.notes.append(
            f"{same}: the gradients of all are added up, and no update applies them. A step that accumulates "
            "over more calls is seen whole where it accumulates over fewer"
        )
    elif not (seen.updates or seen.idle):
        advice = "scaler.step(optimizer) and scaler.update(), or optimizer.step(), in each step"
        yield _still(f"{same}: gradients come, and no update applies them", advice)
    elif not seen.is_learning:
        says = f"{same}: gradients come only to some that the optimizer does not have"
        yield _still(says, "make the optimizer of the weights that are to be trained")
    elif not seen.updates:
        yield _still(f"{same}: all of their gradients are zero", "look for what the loss depends on")
    elif all(update.rate == 0 for update in seen.updates):
        if seen.warms_up:
            case.notes.append(f"{same}: a schedule has set their learning rate to 0")
        else:
            yield _still(f"{same}: their learning rate is 0", "a rate above 0", place)
    elif case.subject.optimizer is sgd:
        case.notes.append(f"{same}, with the optimizer where none is given (SGD, lr={RATE:g})")
    else:
        says = f"{same}: the updates are too small, and vanish as the weights are rounded"
        yield _still(says, "weights in float32, under autocast; or a larger learning rate", place)


def _still(says: str, advice: str, place: str = "") -> Finding:
    places = (place,) if place else ()
    return Finding("no-update", says, places, advice, lane=YOURS, is_fault=True)


def evaluation_mode(case: TrainingCase) -> Iterator[Finding]:
    """The user's step calls the model in evaluation mode: no dropout, and no statistics are learnt."""
    seen = case.steps
    if seen is not None and seen.evaluated:
        yield Finding(
            "evaluation-mode-in-training",
            f"the model is in evaluation mode in {seen.evaluated} of {seen.forwards} calls of a training "
            "step: dropouts do nothing, and batch norms neither use nor learn this batch's statistics",
            tuple(filter(None, (seen.eval_at, seen.evaluated_at))),
            "model.train() before training; freeze single batch norms by their own eval()",
            lane=YOURS,
            is_fault=True,
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")


STEP_FINDINGS: tuple[Callable[[TrainingCase], Iterator[Finding]], ...] = (
    repeated_updates,
    scaled_gradients,
    clipped_scaled_gradients,
    no_scaler_update,
    stale_gradients,
    no_update,
    evaluation_mode,
)
