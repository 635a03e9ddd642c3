"""Every message between processes, one frozen record each, in modules by subject.

Codes 10-29 open and close a session, 30-49 are requests of the controller and of observers, 50-69 a replica's merge
points and returns, 70-89 the server's answers, 90-109 client to worker, 110-139 the supervisor's socket, 140-149 the
server's requests of replicas and of the supervisor, 150-159 the link to a worker on another machine.
``docs/protocol.md`` says who sends which message to whom, and when. All names are imported from here.
"""

from .links import *
from .points import *
from .requests import *
from .runs import *
from .sessions import *
from .shared import *
from .supervision import *

#: Goes up when a record changes in a way that a peer of an older release cannot read. There has been no release yet.
PROTOCOL = 1
