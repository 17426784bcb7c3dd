"""Limit the threads of numpy in joulery's own processes."""

import os


def keep_numpy_on_one_thread() -> None:
    """Limit numpy to the thread that calls it; to be called before numpy is imported.

    numpy's OpenBLAS starts a thread for each other core when it is loaded. Each thread waits busily for up to a tenth
    of a second, then and after each large product: on a machine of many cores that exceeds all other work of a short
    command. A sum that is given to these threads also waits for a core where all are busy with models.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
