"""A session with an arm: the processes around it, who may move it, and what is kept of it."""

import os

# as early as can be: who started this process may end while it still imports
BORN_OF = os.getppid()
