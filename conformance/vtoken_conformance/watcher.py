"""The watching itself: predicts each call by the model, performs it on the executor, compares the two."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import TypeVar

from vtoken.errors import PoolExhausted, SpecError
from vtoken.executor import Attention, Executor, KVSpec
from vtoken.types import ReqId
from vtoken_conformance.bits import is_moderate, make_queries
from vtoken_conformance.compare import VersionWatch, compare_arrays, compare_attention, compare_views
from vtoken_conformance.mismatch import Call, Mismatch
from vtoken_conformance.model import Model
from vtoken_conformance.returned import check_attention, check_observation
from vtoken_conformance.state import Refusal

__all__ = ["Watcher"]

_MULTI_QUERY = 3

Predicted = TypeVar("Predicted")
Result = TypeVar("Result")


class Watcher:
    """One executor beside one model; a base class, whose heirs say what each call is."""

    model: Model

    def __init__(self, inner: Executor, check_every: int, attend: bool) -> None:
        if check_every < 1:
            raise SpecError(f"check_every={check_every}: give at least 1")
        self.inner = inner
        self.num_calls = 0
        self.num_attention_checks = 0
        self._digest = blake2b(digest_size=8)
        self._check_every = check_every
        self._attend = attend

    @property
    def fingerprint_so_far(self) -> str:
        """16 hex digits over the fingerprints of all requests after all calls that were compared in full."""
        return self._digest.hexdigest()

    def _start(self, spec: KVSpec) -> None:
        """Forgets everything: the executor's arrays are new."""
        self.model = Model(spec)
        self._versions = VersionWatch()
        self._digest = blake2b(digest_size=8)

    def _run(
        self,
        call: Call,
        predict: Callable[[], Predicted],
        perform: Callable[[], Result],
        verify: Callable[[Predicted, Result], None] | None = None,
    ) -> Result:
        self.num_calls += 1
        is_full = self.num_calls % self._check_every == 0
        with self._numbered():
            refusal = None
            try:
                predicted = predict()
            except Refusal as caught:
                refusal = caught
            if refusal:  # not inside the except clause: the executor's own errors would drag the refusal along
                raise self._refused(call, refusal, perform)
            try:
                result = perform()
            except SpecError as error:
                raise Mismatch(call.main_rule, f"{call.op} is legal here", "it goes through", _named(error)) from error
            self._compare(call, is_full)
            if verify:
                verify(predicted, result)
            if is_full and self._attend:
                self._probe_attention(call)
        return result

    def _refused(self, call: Call, refusal: Refusal, perform: Callable[[], object]) -> SpecError:
        """The error of a call that must be refused, once nothing was found changed by it (T-8, Q-5)."""
        try:
            perform()
        except SpecError as error:
            if isinstance(error, PoolExhausted) != (refusal.error is PoolExhausted):
                wanted = f"{refusal.error.__name__}, since {refusal}"
                raise Mismatch(refusal.rule, f"error of {call.op}", wanted, _named(error)) from error
            self._compare(Call("refused", call.touched), is_full=True)
            return error
        raise Mismatch(refusal.rule, f"{call.op} is refused: {refusal}", refusal.error.__name__, "it went through")

    def _compare(self, call: Call, is_full: bool) -> None:
        compare_views(self.model, self.inner, call)
        self._versions.compare(self.model, self.inner, call)
        if is_full:
            observation = check_observation(self.inner.observe())
            compare_arrays(self.model, observation, call)
            for req_id in sorted(self.model.requests):
                self._digest.update(f"{req_id} {observation.requests[req_id].fingerprint}\n".encode())

    def _probe_attention(self, call: Call) -> None:
        for req_id in call.touched:
            if req_id not in self.model.requests or not self.model.requests[req_id].num_computed:
                continue
            if self._is_comparable(req_id):
                many = self.num_calls % 2 == 0 and self.model.requests[req_id].num_computed >= _MULTI_QUERY
                num_queries = _MULTI_QUERY if many else 1
                q = make_queries(self.model.spec, str(self.num_calls), num_queries)
                try:
                    seen = self.inner.attend(req_id, q, num_queries)
                except SpecError as error:
                    raise Mismatch("A-1", "attend is legal here", "it goes through", _named(error)) from error
                self._compare_attention(req_id, check_attention(seen), q, num_queries)

    def _is_comparable(self, req_id: ReqId) -> bool:
        """Whether all live tokens are ordinary numbers, so that exact arithmetic has an answer."""
        return all(is_moderate(data, self.model.spec.dtype) for data in self.model.requests[req_id].kv.values())

    def _compare_attention(self, req_id: ReqId, seen: Attention, q: bytes, num_queries: int) -> None:
        end = self.model.requests[req_id].num_computed
        compare_attention(self.model, req_id, seen, q, range(end - num_queries, end))
        self.num_attention_checks += 1

    @contextmanager
    def _numbered(self) -> Iterator[None]:
        try:
            yield
        except Mismatch as mismatch:
            mismatch.step = self.num_calls
            raise


def _named(error: SpecError) -> str:
    return f"{type(error).__name__}: {error}"
