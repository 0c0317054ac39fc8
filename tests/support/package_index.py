"""An index of packages on this machine, with a model in parts."""

import hashlib
import http.server
import re
import zipfile
from pathlib import Path

from pylongctx.catalog.pypi import Wheel

NAME, FILE = "tiny", "tiny-q8_0.gguf"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Index(http.server.ThreadingHTTPServer):
    """The lists of a folder as an index of packages; a list of what was asked, and bytes that a file stops after."""

    def __init__(self, folder):
        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args):
                super().__init__(*args, directory=str(folder))

            def log_message(self, *args):
                pass

            def do_GET(self):
                if not (first := re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")):
                    return super().do_GET()
                data = Path(self.translate_path(self.path)).read_bytes()[int(first[1]) :]
                self.server.asked.append(f"{self.path} from {first[1]}")
                self.send_response(206)
                self.send_header("Content-Length", len(data))
                self.end_headers()
                self.wfile.write(data)

            def copyfile(self, source, out):
                data = source.read()
                self.server.asked.append(self.path)
                out.write(data[: self.server.stops_after] if self.path.endswith(".whl") else data)

        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.asked, self.stops_after = folder, [], None
        self.url = f"http://127.0.0.1:{self.server_port}/simple"


def wheel_of(folder, part: int, data: bytes) -> Wheel:
    """Write a package that holds part of a model."""
    package = f"tiny-gguf-part{part}"
    wheel = Wheel(package, "1.0.0", 0, "")
    path = folder / "simple" / package / wheel.file
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(f"tiny_gguf_part{part}/__init__.py", "PART = True\n")
        archive.writestr(f"tiny_gguf_part{part}/data/{FILE}.part0{part}", data)
    return Wheel(package, "1.0.0", path.stat().st_size, sha256(path.read_bytes()))
