"""Session of a sequence whose target is behind a network."""

from ..rules.sampled import DraftToken
from ..session import Session
from ..verdict import NotFinite
from .pipeline import LinkedPipeline


class LinkSession(Session):
    """Adds the verbs of link schedules: send a batch, let the target decode alone."""

    pipeline: LinkedPipeline

    @property
    def link(self) -> LinkedPipeline:
        return self.pipeline

    def _not_finite(self, error: NotFinite) -> NotFinite:
        return error  # the target's layers are elsewhere

    def _count_step(self, overlap: bool) -> None:
        """Count nothing: real time counts across a link, and the clock models stages only."""

    @property
    def end_is_drafted(self) -> bool:
        """Return True if the sequence ends within its draft tokens, provided all are accepted."""
        tree, length = self.tree, self.tree.position(len(self.tree) - 1) + 1
        longest = len(self.result.prompt_ids) + self.max_new_tokens
        is_longest = length >= min(longest, self.target.max_positions)
        return is_longest or not {*self.ends}.isdisjoint(tree.tokens[1:])

    def send_batch(self, *, is_early: bool = False) -> None:
        """Send the rows that are new to the target. ``is_early`` says that the batch continues."""
        tree, first = self.tree, self.tree.num_injected
        # Row 0 is the root: no draft token, so it has no q.
        rows = range(max(first, 1), len(tree))
        drawn = [DraftToken(tree.tokens[row], tree.draft_probabilities[row]) for row in rows]
        q = [token.q for token in drawn] if self.verifier.needs_q else []
        tokens = [token.token for token in drawn]
        self.link.send(tree.tokens[first:1], tokens, q, is_early=is_early)
        tree.num_injected = len(tree)

    def stream(self) -> None:
        """Let the target decode alone to the end. Batches in flight still get their results."""
        self.tree.truncate(max(self.tree.num_injected, 1))  # The target never sees the other rows.
        while not self.done:
            if not self.link.is_streaming:
                self.link.stream(self.tree.tokens[self.tree.num_injected : 1])
                self.tree.num_injected = max(self.tree.num_injected, 1)
            self.resolve(self.link.tick())
