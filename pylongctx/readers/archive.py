"""Zip files of documents, with a limit on what is unpacked."""

import io
import zipfile

from pylongctx.readers.extract import MAX_BYTES, Refused

CHUNK = 1 << 20
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the others unpack without a limit, and no document uses them


class Archive:
    """The parts of a zip file.

    Raises Refused when a part is damaged or has a password, when all that is unpacked is more than ``MAX_BYTES``, and
    KeyError when there is no such part.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except Exception as reason:  # zipfile raises what it meets in damaged bytes
            raise Refused(f"is a damaged zip file ({reason}): copy or download it again") from reason
        self._left = MAX_BYTES
        self.names = set(self._zip.namelist())

    def read(self, name: str) -> bytes:
        """Return a part."""
        info = self._zip.getinfo(name)
        if info.flag_bits & 1:
            raise Refused("is protected with a password: save it without one")
        if info.compress_type not in METHODS:
            raise Refused("is compressed by a method that documents do not use: save it again with another program")
        try:
            return self._unpacked(info)
        except Refused:
            raise
        except Exception as reason:  # zipfile raises what it meets in damaged bytes
            raise Refused(f"is damaged in the part {name} ({reason}): copy or download it again") from reason

    def _unpacked(self, info: zipfile.ZipInfo) -> bytes:
        found = bytearray()
        with self._zip.open(info) as part:
            while piece := part.read(CHUNK):
                found += piece
                self._left -= len(piece)
                if self._left < 0:
                    raise Refused(f"unpacks to more than {MAX_BYTES} bytes, and no more are read")
        return bytes(found)
