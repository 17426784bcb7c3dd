"""Threads of numpy in joulery's own processes."""

import os


def keep_numpy_on_one_thread() -> None:
    """Limit numpy to the thread that calls it; to be called before numpy is imported.

    OpenBLAS, which numpy brings, starts a thread for each other core when it is loaded, and each of them waits busily
    for up to a tenth of a second, as after each large product: on a machine of many cores that is more than all else
    that a short command does. A sum that is handed to them would also wait for a core where all are busy with models.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
