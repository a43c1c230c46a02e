"""Which format a file has that was given as weights: by its content, whatever its name says."""

import zipfile
from typing import BinaryIO

# How files of other formats begin, and what they are.
BEGINNINGS = {
    b"\x1f\x8b": "is compressed by gzip; unpack it first",
    b"BZh": "is compressed by bzip2; unpack it first",
    b"\xfd7zXZ": "is compressed by xz; unpack it first",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unpack it first",
    b"\x93NUMPY": "is a NumPy array (.npy), without the names of weights",
    b"\x89HDF": "is an HDF5 file, as Keras writes",
    b"version https://git-lfs": "is Git LFS's pointer to a file; fetch that with git lfs pull",
    b"<": "is a web page or XML; download the file itself",
}
SAFETENSORS = "is a safetensors file; read it with --weights"
SAVE_AGAIN = "load it with what wrote it, and save its state_dict() with torch.save"
# What a zip archive is that has a member whose name ends like this; the first that fits counts.
MEMBERS = {
    "/constants.pkl": f"is a TorchScript archive; {SAVE_AGAIN}",
    "/archive_format": f"is a program of torch.export; {SAVE_AGAIN}",
    "/data.pkl": "",  # as torch.save writes
}


def format_of(content: BinaryIO) -> str:
    """Return, in words, the format of a file that torch.save did not write, and what to do; "" if
    torch.save may have written it. `content` is at its beginning, before and after."""
    begin = content.read(512)
    content.seek(0)
    if not begin:
        return "is empty; fetch it again"
    if begin[8:9] == b"{":  # after the length of the header
        return SAFETENSORS
    if begin[257:262] == b"ustar":
        return "is a tar archive; unpack it first"
    if begin.startswith(b"PK"):
        return _zip_format(content)
    return next((words for known, words in BEGINNINGS.items() if begin.startswith(known)), "")


def _zip_format(content: BinaryIO) -> str:
    """Return what `format_of` does, for a zip archive; torch.save writes such, too."""
    try:
        with zipfile.ZipFile(content) as archive:
            names = archive.namelist()
    except Exception:  # damage can look like much else
        return ""
    finally:
        content.seek(0)
    for ending, words in MEMBERS.items():
        if any(name.endswith(ending) for name in names):
            return words
    if names and all(name.endswith(".npy") for name in names):
        return "is an archive of NumPy arrays (.npz); save a dict of tensors with torch.save"
    return "is a zip archive of other files; unpack it first"
