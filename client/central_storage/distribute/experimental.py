"""``cs.distribute.experimental``: the names of ``tf.distribute.experimental``. All are the names of ``cs`` itself."""

from typing import TYPE_CHECKING

from central_storage.core.options import CommunicationImplementation, CommunicationOptions, ValueContext
from central_storage.diagnostics.tensorflow_names import attributes
from central_storage.strategy.service_strategy import CentralStorageStrategy

__all__ = ["CentralStorageStrategy", "CommunicationImplementation", "CommunicationOptions", "ValueContext"]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.distribute.experimental")
