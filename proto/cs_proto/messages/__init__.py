"""Every message between processes, one frozen record each, in modules by what they are about.

Codes 10-29 open and close a session, 30-49 are the controller's and observers' requests, 50-69 what replicas bring
to merge points, 70-89 what the server answers, 90-109 client to worker, 110-139 the supervisor's socket, 140-149 what
the server asks. ``docs/protocol.md`` tells who sends what to whom, and when. All names are imported from here.
"""

from .points import *
from .requests import *
from .runs import *
from .sessions import *
from .shared import *
from .supervision import *

#: Goes up when a record changes in a way that a peer of an older release cannot read. There has been no release yet.
PROTOCOL = 1
