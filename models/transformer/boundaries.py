"""Cut the layers of a target into stages."""


def stage_boundaries(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the boundaries (0, b1, .., L) for cutting L layers into n contiguous stages.

    Sizes differ by at most one. Longer stages come last, since the first stage also embeds.

    Raises:
        ValueError: n is not in [1, L].
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"num_stages: {num_stages} stages do not fit a target of {num_layers} layers; "
            f"choose 1 to {num_layers}"
        )
    size, num_longer = divmod(num_layers, num_stages)
    first_longer = num_stages - num_longer
    return tuple(k * size + max(k - first_longer, 0) for k in range(num_stages + 1))
