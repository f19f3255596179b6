"""``--json FILE`` of the benchmarks, with ``-`` for standard output."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

STANDARD_OUTPUT = Path("-")


@contextlib.contextmanager
def json_file(path: Path | None) -> Iterator[Path | None]:
    """The file to write to. For ``-`` a temporary one, which is printed at the end; everything else that is printed meanwhile
    goes to standard error.
    """
    if path != STANDARD_OUTPUT:
        yield path
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="mc2-bench-json-") as folder:
        file = Path(folder) / "result.json"
        with contextlib.redirect_stdout(sys.stderr):
            yield file
        if file.exists():  # not after wrong usage
            sys.stdout.write(file.read_text())
