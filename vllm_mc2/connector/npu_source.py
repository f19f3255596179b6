"""Peers of a decode on an NPU, as they are copied from."""

import itertools
import logging
import time
from collections.abc import Callable, Sequence

from vllm_mc2._native import AclError, DeviceCopier, DeviceImport
from vllm_mc2.errors import DeviceError
from vllm_mc2.layout import PoolLayout
from vllm_mc2.session import Session

logger = logging.getLogger("vllm.mc2.npu")

RETRY_SECONDS = 0.1
ATTEMPTS_A_LOG_LINE = 100


class NpuPart:
    """The memory of one of the peer's workers, mapped. See :class:`~vllm_mc2.connector.remote_pulling.Part`."""

    def __init__(self, imported: DeviceImport, copier: DeviceCopier, layout: PoolLayout) -> None:
        """Takes over both. ``layout``: the peer's blocks, as if they were packed."""
        self.layout = layout
        self._imported = imported
        self._copier = copier

    def read(self, own_ids: Sequence[int], peer_ids: Sequence[int]) -> None:
        """From device to device.

        Raises:
            DeviceError: a copy has failed. Nothing is written any more.
        """
        try:
            self._copier.copy(list(own_ids), list(peer_ids))
        except AclError as error:
            self._wait_until_nothing_is_written()
            raise DeviceError(str(error)) from error

    def _wait_until_nothing_is_written(self) -> None:
        """After a failed copy, nearly always at once. As long as a stream can neither be emptied nor ended, the request's blocks
        must be nobody else's, which they are until this returns.
        """
        for num_attempts in itertools.count():
            try:
                self._copier.copy([], [])
            except AclError as error:
                if num_attempts % ATTEMPTS_A_LOG_LINE == 0:
                    logger.error("a copy that has failed may still be writing, its blocks are kept: %s", error)  # noqa: TRY400
                time.sleep(RETRY_SECONDS)
            else:
                return

    def close(self) -> None:
        """Unmap."""
        try:
            self._copier.close()
            self._imported.close()
        except AclError as error:
            logger.warning("a peer's memory could not be unmapped: %s", error)


class NpuSource:
    """One peer on this host."""

    def __init__(self, on_close: Callable[["NpuSource"], None]) -> None:
        """``on_close`` is called before the sessions end."""
        self._on_close = on_close
        self.sessions: list[Session] = []
        self.parts: list[NpuPart] = []

    def copy(self, own_ids: Sequence[int], peer_ids: Sequence[int]) -> None:
        """Puller's thread."""
        self._require_peer()
        for part in self.parts:
            part.read(own_ids, peer_ids)
        self._require_peer()

    def _require_peer(self) -> None:
        if any(session.is_gone() for session in self.sessions):
            raise DeviceError("prefill has ended: what its memory holds now is not known")

    def mapped(self) -> list[tuple[int, PoolLayout]]:
        """What the peer has shared with us."""
        return [(-1, part.layout) for part in self.parts]

    def close(self) -> None:
        """Unmap, and say so by ending the sessions."""
        for part in self.parts:
            part.close()
        self._on_close(self)
        for session in self.sessions:
            session.close()
