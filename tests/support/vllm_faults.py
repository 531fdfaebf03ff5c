"""Faults of the filling scheduler and runners, to be planted with ``monkeypatch``."""

from pipedraft.inference.vllm import filling, ranks


def keep_epoch(self, request):
    request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)


def keep_position(self, request):
    self._flight(request).epoch += 1


def keep_every_guess(self, request, sent, token):
    """As ``_verify``, but the confirmed guess is put back, too."""
    guesses = self._take_back(request, len(self._flight(request).guesses))
    if not guesses or guesses[0] == token:
        return guesses
    self._restart(request)
    return []


def append_hashed(self, request, guesses):
    for guess in guesses:
        request.append_output_token_ids(guess)
    self._flight(request).guesses.extend(guesses)


def sample_all(self, *args):
    return super(ranks.FillingRunner, self)._sample(*args)


def keep_stale_samples(self, *args):
    generators = dict(self.input_batch.generators)
    self.input_batch.generators.clear()
    result = super(ranks.FillingRunner, self)._bookkeeping_sync(*args)
    self.input_batch.generators.update(generators)
    return result


def forget_preemption(self, request, timestamp, drop_stale_output=False):
    super(filling.FillingScheduler, self)._preempt_request(request, timestamp, drop_stale_output)


SCHEDULER, RUNNER = filling.FillingScheduler, ranks.FillingRunner
FAULTS = {
    "no truncation": [(RUNNER, "_truncate", lambda *_: None)],
    "stale output kept": [(SCHEDULER, "_restart", keep_epoch)],
    "stale output and its sample kept": [
        (SCHEDULER, "_restart", keep_epoch),
        (RUNNER, "_bookkeeping_sync", keep_stale_samples),
    ],
    "position over-advanced": [(SCHEDULER, "_restart", keep_position)],
    "guess hashed": [(SCHEDULER, "_put", append_hashed)],
    "guess cached": [(SCHEDULER, "_cap_cached_blocks", lambda _: None)],
    "token recorded twice": [(SCHEDULER, "_verify", keep_every_guess)],
    "generator advanced by a stale step": [(RUNNER, "_sample", sample_all)],
    "stale sample in the history": [(RUNNER, "_bookkeeping_sync", keep_stale_samples)],
    "guesses kept when outputs are dropped": [(SCHEDULER, "_preempt_request", forget_preemption)],
    "stale steps in flight not counted": [(SCHEDULER, "_drop", lambda *_: None)],
}
