"""The argument of a data set function: its place among the pipelines and replicas."""

from __future__ import annotations

from dataclasses import dataclass

from cs_proto.errors import InvalidArgumentError

__all__ = ["InputContext"]


@dataclass(frozen=True)
class InputContext:
    """The argument of a data set function: its place among the pipelines and replicas.

    Args:
        num_input_pipelines: The number of pipelines.
        input_pipeline_id: The number of the pipeline that the function makes, from 0.
        num_replicas_in_sync: The number of replicas.

    Examples:
        >>> import central_storage as cs
        >>> cs.InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(128)
        32
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """``global_batch_size / num_replicas_in_sync``.

        Args:
            global_batch_size: The number of rows of all replicas together.

        Raises:
            InvalidArgumentError: The result is not whole (a ValueError).
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise InvalidArgumentError(
                f"the global batch size {global_batch_size} is not a multiple of the {self.num_replicas_in_sync} "
                "replicas"
            )
        return size
