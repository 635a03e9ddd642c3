"""The devices of one replica: what a strategy does with a replica that owns several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from central_storage.core import context
from central_storage.core.devices import logical_devices
from central_storage.core.public_objects import Closed
from cs_proto.errors import ContextError

__all__ = ["ReplicaDevices"]


class ReplicaDevices(Closed):
    """What users call on a strategy inside a replica function, for the devices of that replica."""

    @property
    def devices_by_replica(self) -> list[list[str]]:
        """The devices of each replica, as full names."""
        raise NotImplementedError

    def logical_devices_here(self) -> tuple[Sequence[str], logical_devices.Place]:
        """The devices of the current replica, as full names, and what brings an array to one of them."""
        replica = context.current_replica(self)
        return (self.devices_by_replica[0], _nowhere) if replica is None else (replica.devices, replica.place)

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> logical_devices.LogicalTensor:
        """Put ``tensor`` on one of the replica's devices; read as an array it is unchanged. Called inside a replica
        function.

        Args:
            tensor: An array.
            logical_device_id: The number of the device, from 0.

        Returns:
            The array with its place.

        Raises:
            InvalidArgumentError: The replica has no such device (a ValueError).
            ContextError: Called outside a replica (a RuntimeError).

        Examples:
            >>> import numpy as np
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy([("cpu:0", "cpu:1")], in_process=True) as strategy:
            ...     strategy.run(lambda: np.asarray(strategy.experimental_assign_to_logical_device([1, 2], 1))).tolist()
            [1, 2]
        """
        return logical_devices.assign(tensor, logical_device_id, *self.logical_devices_here())

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> logical_devices.LogicalTensor:
        """Cut ``tensor`` into equal pieces, one on each of the replica's devices. Called inside a replica function.

        Args:
            tensor: An array.
            partition_dimensions: For each axis, the number of parts into which it is cut.

        Returns:
            The array with its places; read as an array it is unchanged. ``result.pieces`` are in row-major order.

        Raises:
            InvalidArgumentError: ``partition_dimensions`` is not one int per axis, their product is not the number of
                the replica's devices, or an axis cannot be cut in this way (a ValueError).
            ContextError: Called outside a replica (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy([("cpu:0", "cpu:1")], in_process=True) as strategy:
            ...     def pieces():
            ...         return len(strategy.experimental_split_to_logical_devices([1, 2], [2]).pieces)
            ...
            ...     strategy.run(pieces)
            2
        """
        return logical_devices.split(tensor, partition_dimensions, *self.logical_devices_here())

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> logical_devices.LogicalTensor:
        """Put ``tensor`` on each of the replica's devices; read as an array it is unchanged. Called inside a replica
        function.

        Args:
            tensor: An array.

        Returns:
            The array with its places.

        Raises:
            ContextError: Called outside a replica (a RuntimeError).

        Examples:
            >>> import numpy as np
            >>> import central_storage as cs
            >>> with cs.CentralStorageStrategy([("cpu:0", "cpu:1")], in_process=True) as strategy:
            ...     place = strategy.experimental_replicate_to_logical_devices
            ...     strategy.run(lambda: np.asarray(place([1, 2]))).tolist()
            [1, 2]
        """
        return logical_devices.replicate(tensor, *self.logical_devices_here())


def _nowhere(array: Any, device: str) -> NoReturn:
    raise ContextError("the devices of a replica can be used only inside a replica function")
