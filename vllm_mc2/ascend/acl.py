"""The ACL runtime, ``libascendcl.so``, if there is one. Nothing is loaded before it is asked for.

CANN's ``set_env.sh`` puts the library where the loader finds it (``LD_LIBRARY_PATH``).
"""

import functools

from vllm_mc2._native import Acl, AclError
from vllm_mc2.errors import DeviceError

LIBRARY = "libascendcl.so"


@functools.lru_cache(maxsize=1)
def load_acl() -> Acl:
    """The library, loaded once for the process and initialised, unless torch_npu has done that. Any thread.

    Raises:
        DeviceError: there is none, or it lacks what cannot be done without.
    """
    try:
        acl = Acl(LIBRARY)
        acl.initialize()
    except OSError as error:
        raise DeviceError(f"no usable {LIBRARY}: {error} (has CANN's set_env.sh been sourced?)") from error
    except AclError as error:
        raise DeviceError(str(error)) from error
    return acl
