"""Decoding what image folders really hold, and augmentation that its key alone decides."""

import io
import itertools
import pickle
import random
import struct
import warnings
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from needs import needs_timm
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from scipy.stats import ks_2samp
from torch import Tensor
from torchvision.transforms import v2

from recipe.data import decoding
from recipe.data.decoding import decode, image_size
from recipe.data.images import (
    Draw,
    Key,
    TrainTransform,
    ValTransform,
    empty_batch,
    mean_color,
    resize,
)
from recipe.errors import UserError
from recipe.settings.config import Config
from recipe.settings.flags import AUTO_AUGMENTS

WIDTH, HEIGHT = 61, 47
TIMMS = pytest.param("rand-m7-mstd0.5-inc1", marks=needs_timm)
AUGMENTS = [None, *AUTO_AUGMENTS, TIMMS]
INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


def picture(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """A smooth, asymmetric picture: each flip, turn, crop or swap of channels shows."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * x / width, 255 * y / height, 128 + 100 * np.sin(x * y / 300)], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


def array(image: Image.Image | np.ndarray) -> np.ndarray:
    return np.asarray(image).astype(int)


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def a_transform(size: int, **others: Any) -> TrainTransform:
    return TrainTransform(Config(train_crop_size=size, **others))


def augment(image: Image.Image, transform: TrainTransform, *key: int) -> Tensor:
    size = transform.config.train_crop_size
    out = empty_batch(1, size, size)[0]
    transform(encoded(image), "a.png", cast(Key, key), out)
    return out


def validate(content: bytes, resize_size: int, crop: int) -> tuple[Tensor, int]:
    out = empty_batch(1, crop, crop)[0]
    transform = ValTransform(Config(val_resize_size=resize_size, val_crop_size=crop))
    return out, transform(content, "a.jpg", (0, 0, 0), out)


# ---- decoding ----


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    """A warning for each odd file of 1.28 million would bury everything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def in_all_formats() -> dict[str, tuple[bytes, np.ndarray, float]]:
    """What is encoded, what becomes of it, and by how much that may differ on average."""
    rgb, grey, palette = picture(), picture().convert("L"), picture().quantize(16)
    levels = np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH)
    clear, flat = picture().convert("RGBA"), array(palette.convert("RGB"))
    clear.putalpha(Image.new("L", clear.size, 7))
    red, blue = (Image.new("RGB", (8, 8), color) for color in ("red", "blue"))
    exif, texts = Image.Exif(), PngInfo()
    exif[0x0112] = 6  # turn by 90 degrees
    texts.add_text("XML:com.adobe.xmp", "<x:xmpmeta>" * 200_000, zip=True)
    texts.add_itxt("Comment", "A" * 2**21)
    files: dict[str, tuple[Image.Image, str, dict[str, Any], np.ndarray, float]] = {
        **{name: (rgb, name, {}, array(rgb), 0) for name in ("PNG", "BMP", "TIFF", "PPM")},
        "WebP": (rgb, "WEBP", {"lossless": True}, array(rgb), 0),
        "JPEG": (rgb, "JPEG", {"quality": 95}, array(rgb), 3),
        "an orientation is ignored": (rgb, "JPEG", {"quality": 95, "exif": exif}, array(rgb), 3),
        "large texts": (rgb, "PNG", {"pnginfo": texts}, array(rgb), 0),
        "a large colour profile": (rgb, "PNG", {"icc_profile": bytes(2**21)}, array(rgb), 0),
        "grey PNG": (grey, "PNG", {}, array(grey), 0),
        "grey JPEG": (grey, "JPEG", {}, array(grey), 3),
        "black and white": (grey.convert("1"), "PNG", {}, 255 * array(grey.convert("1")), 0),
        # The upper bits are kept.
        "16 bits, PNG": (Image.fromarray(levels), "PNG", {}, levels >> 8, 0),
        "16 bits, TIFF": (Image.fromarray(levels), "TIFF", {}, levels >> 8, 0),
        "transparency is dropped": (clear, "PNG", {}, array(rgb), 0),
        "that of grey": (picture().convert("LA"), "PNG", {}, array(grey), 0),
        "of a colour": (palette, "PNG", {"transparency": 3}, flat, 0),
        "of colours": (palette, "PNG", {"transparency": bytes(range(0, 160, 10))}, flat, 0),
        "first frame": (red, "GIF", {"save_all": True, "append_images": [blue]}, array(red), 0),
    }
    return {
        what: (encoded(image, image_format, **options), expected, tolerance)
        for what, (image, image_format, options, expected, tolerance) in files.items()
    }


@pytest.mark.parametrize("what", in_all_formats())
def test_formats(what: str) -> None:
    """By content: the suffix says nothing."""
    content, expected, tolerance = in_all_formats()[what]
    image, _ = decode(content, "a.JPEG")
    expected = expected if expected.ndim == 3 else expected[:, :, None]
    assert (image.dtype, image.shape) == (np.uint8, (*expected.shape[:2], 3))
    assert abs(array(image) - expected).mean() <= tolerance
    assert image_size(content, "a.JPEG") == image.shape[:2]


def test_cmyk_as_adobe_writes_it_and_without_its_marker() -> None:
    content = encoded(picture().convert("CMYK"), "JPEG", quality=95)
    marker = content.index(b"\xff\xee")
    assert content[marker + 4 : marker + 9] == b"Adobe"
    length = int.from_bytes(content[marker + 2 : marker + 4], "big")
    for file in (content, content[:marker] + content[marker + 2 + length :]):
        assert abs(array(decode(file, "a.jpg")[0]) - array(picture())).mean() < 5


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_truncated_file_is_a_user_error_that_names_it(image_format: str) -> None:
    content = encoded(picture(), image_format)
    # The last 21 bytes of a PNG are checksums and an end marker: without them no pixel is lost.
    for length in [*range(1, len(content) - 22, 41), len(content) - 22]:
        with pytest.raises(UserError, match=r"n01440764_1\.JPEG: cannot be read"):
            decode(content[:length], "n01440764_1.JPEG")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "It has 0 bytes"),
        (b"GIF89a", "cannot be read as an image"),
        (b"\xff\xd8\xff", "of no known format"),
        (b"\n<!DOCTYPE html><html>404</html>", "of no known format.*<!DOCTYPE html>"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"begins with b'version https://git-lfs"),
    ],
)
def test_file_that_is_no_image(content: bytes, words: str) -> None:
    with pytest.raises(UserError, match=rf"^a\.jpg: .*{words}") as error:
        decode(content, "a.jpg")
    assert "object at" not in str(error.value)
    assert "\n" not in str(error.value)


LEVELS = np.linspace(0, 1, WIDTH * HEIGHT, dtype=np.float32).reshape(HEIGHT, WIDTH)


@pytest.mark.parametrize(
    "content",
    [
        encoded(Image.fromarray(LEVELS), "TIFF"),
        encoded(Image.fromarray((LEVELS * 255).astype(np.int32)), "TIFF"),
        encoded(Image.fromarray((LEVELS * 2**31 * 0.99).astype(np.int32)), "TIFF"),
        b"Pf 61 47 -1.0\n" + LEVELS.tobytes(),
    ],
    ids=["float", "32 bits of which 8 are used", "32 bits", "PFM"],
)
def test_levels_of_no_known_range_are_refused(content: bytes) -> None:
    """They used to become black, or white. By the head already, so that shards are not made."""
    for look in (decode, image_size):
        with pytest.raises(UserError, match=r"a\.tif: .* unknown range: convert it to 8 bits"):
            look(content, "a.tif")


def test_levels_of_12_bits_are_not_taken_for_16() -> None:
    """Two pixels in three bytes, as TIFF packs them; Pillow writes none. PGM states its range."""
    tags = {256: 2, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 3}
    fields = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in tags.items())
    tiff = b"II*\0" + struct.pack("<I", 12) + b"\xff\xf8\x00\0" + struct.pack("<H", 9) + fields
    for content in (tiff + bytes(4), b"P5 2 1 4095\n" + struct.pack(">2H", 4095, 2048)):
        assert decode(content, "a.tif")[0][0, :, 0].tolist() == [255, 128]


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("limit", ["MAX_PIXELS", "MAX_RATIO"])
def test_what_is_too_large_or_too_long_is_refused_before_it_is_decoded(
    image_format: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One limit for all formats; as it is set, an image may be larger than Pillow warns of."""
    bomb = b"P6 13000 13000 255\n"  # larger than Pillow's first limit, which only warns
    assert image_size(bomb, "a.ppm") == (13_000, 13_000)
    content = encoded(picture(80, 40), image_format)
    largest = {"MAX_PIXELS": 80 * 40, "MAX_RATIO": 2}[limit]
    monkeypatch.setattr(decoding, limit, largest)
    decode(content, "a.jpg")
    monkeypatch.setattr(decoding, limit, largest - 1)
    monkeypatch.setattr(Image.Image, "load", None)
    monkeypatch.setattr(decoding.simplejpeg, "decode_jpeg", None)
    transform, out = a_transform(24), empty_batch(1, 24, 24)[0]
    for look in (decode, image_size, lambda *given: transform(*given, (0, 0, 0), out)):
        with pytest.raises(UserError, match=rf"a\.jpg: .*\(80 x 40 pixels.* {largest - 1:,} "):
            look(content, "a.jpg")


# ---- transforms ----


@needs_timm
def test_timms_rand_augment_is_timms() -> None:
    """With the settings of timm's own transforms, and drawn from the same generators."""
    from timm.data.transforms_factory import transforms_imagenet_train

    settings: dict[str, Any] = {"interpolation": "bicubic", "auto_augment": "rand-m7-mstd0.5-inc1"}
    ours, image = a_transform(160, **settings).after_crop[1], picture(160, 160)
    theirs = transforms_imagenet_train(160, separate=True, **settings)[1].transforms[0]
    for seed in range(20):
        torch.manual_seed(seed)
        changed = ours(image)
        torch.manual_seed(seed)
        drawn = int(torch.randint(2**32, ()))
        random.seed(drawn)
        np.random.seed(drawn)
        assert np.array_equal(changed, theirs(image))


def test_crop_flip_and_scale() -> None:
    square = picture(HEIGHT, HEIGHT)
    expected = torch.from_numpy(np.array(square)).permute(2, 0, 1)
    never, always, half = (
        a_transform(HEIGHT, random_crop_scale=(1, 1), hflip_prob=share) for share in (0, 1, 0.5)
    )
    assert torch.equal(augment(square, never, 1, 2, 3), expected)
    assert torch.equal(augment(square, always, 1, 2, 3), expected.flip(2))
    is_flipped = [not torch.equal(augment(square, half, 0, 0, i), expected) for i in range(400)]
    assert 160 < sum(is_flipped) < 240


@pytest.mark.parametrize(("padding", "width", "height"), [(4, 28, 28), (0, 30, 33), (3, 24, 40)])
def test_padding_and_crop_are_torchvisions(padding: int, width: int, height: int) -> None:
    """Each crop is one of those that torchvision's RandomCrop can draw, all about as often."""
    image, transform = picture(width, height), a_transform(28, random_crop_padding=padding)
    padded = v2.functional.pad(torch.from_numpy(np.array(image)).permute(2, 0, 1), [padding] * 4)
    places = {}
    for top in range(padded.shape[1] - 27):
        for left in range(padded.shape[2] - 27):
            crop = padded[:, top : top + 28, left : left + 28]
            places[crop.numpy().tobytes()] = places[crop.flip(2).numpy().tobytes()] = top, left
    seen = [places[augment(image, transform, 1, 2, i).numpy().tobytes()] for i in range(2000)]
    for axis in (0, 1):
        drawn = [place[axis] for place in seen]
        number = padded.shape[axis + 1] - 27
        assert ks_2samp(drawn, np.arange(4000) % number).pvalue > 0.001


def test_what_padding_leaves_too_small_is_refused() -> None:
    with pytest.raises(UserError, match=r"size 40: there is an image of 28 x 30 .* 36 x 38; give"):
        augment(picture(28, 30), a_transform(40, random_crop_padding=4), 0, 0, 0)


@pytest.mark.parametrize(
    ("mean", "color"),
    [((0.485, 0.456, 0.406), [124, 116, 104]), ((0.286, 0.286, 0.286), [73, 73, 73])],
)
def test_erasing_fills_a_rectangle_with_the_mean_color(
    mean: tuple[float, float, float], color: list[int]
) -> None:
    image = Image.new("RGB", (64, 64), (255, 0, 0))
    out = augment(image, a_transform(32, random_erase=1, image_mean=mean), 0, 0, 0)
    assert mean_color(Config(image_mean=mean)) == color
    is_erased = (out == torch.tensor(color)[:, None, None]).all(dim=0)
    assert 0.01 < is_erased.float().mean() < 0.4
    assert is_erased.sum() == is_erased.any(dim=1).sum() * is_erased.any(dim=0).sum()
    assert (out[:, ~is_erased] == torch.tensor([[255], [0], [0]])).all()
    mean_after_normalisation = (np.array(color) / 255 - mean) / 0.225
    assert abs(mean_after_normalisation).max() < 0.01


def test_val_transform_resizes_the_short_side_and_crops_the_centre() -> None:
    out, _ = validate(encoded(picture(96, 64)), 32, 24)
    resized = array(picture(96, 64).resize((48, 32), Image.Resampling.BILINEAR))
    assert abs(out.permute(1, 2, 0).numpy() - resized[4:28, 12:36]).max() <= 1


# ---- one key, one result ----


def random_states() -> tuple[object, ...]:
    """Of torch's, Python's and numpy's generators."""
    state = torch.get_rng_state().tolist()
    return state, random.getstate(), repr(np.random.get_state(legacy=False))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("auto_augment", AUGMENTS)
def test_pixels_and_other_random_streams_know_nothing_of_each_other(
    auto_augment: str | None, interpolation: str
) -> None:
    """Torch's is put back, and timm puts back Python's and numpy's, which nothing else touches."""
    transform = a_transform(
        16, auto_augment=auto_augment, random_erase=0.5, interpolation=interpolation
    )
    expected = [augment(picture(), transform, 3, 4, index) for index in range(12)]
    transform = pickle.loads(pickle.dumps(transform))  # as it comes to a worker
    for index in reversed(range(12)):
        torch.manual_seed(index)
        torch.randn(index)  # an odd count leaves half a pair of normals in the generator
        random.seed(index)
        np.random.seed(index)
        before = random_states()
        assert torch.equal(augment(picture(), transform, 3, 4, index), expected[index])
        assert random_states() == before


def test_each_part_of_the_key_counts() -> None:
    """In what is drawn for the crop, and after it."""
    keys = [*itertools.product(range(4), repeat=3), (2**63, 10**6, 2**40), (0, 10**6, 2**40)]
    assert len({a_transform(16).draw(375, 500, key) for key in keys}) == len(keys)
    whole = a_transform(HEIGHT, random_crop_scale=(1, 1), hflip_prob=0, random_erase=1)
    square = picture(HEIGHT, HEIGHT)
    erased = {augment(square, whole, *key).numpy().tobytes() for key in keys}
    assert len(erased) == len(keys)


def test_draws_are_pinned() -> None:
    """Changed draws would give a resumed run other pixels than it began with."""
    drawn = a_transform(224).draw(375, 500, (42, 7, 1_281_166))
    assert drawn == Draw(top=4, left=0, height=214, width=205, flip=True, seed=448228455)


def test_draws_are_those_of_random_resized_crop() -> None:
    """Sizes, places and flips have the distribution of torchvision's transform."""
    theirs, image = v2.RandomResizedCrop(24), torch.empty(3, 75, 100)
    torch.manual_seed(0)
    expected = [theirs.make_params([image]) for _ in range(4000)]
    drawn = [vars(a_transform(24).draw(75, 100, (0, 0, index))) for index in range(4000)]
    for name in ("top", "left", "height", "width"):
        a, b = ([one[name] for one in draws] for draws in (expected, drawn))
        assert ks_2samp(a, b).pvalue > 0.001
    assert 0.46 < np.mean([one["flip"] for one in drawn]) < 0.54


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(lambda t: (min(t), max(t))),
    st.integers(0, 2**40),
)
def test_crops_lie_within_the_image(
    height: int, width: int, scale: tuple[float, float], index: int
) -> None:
    drawn = a_transform(24, random_crop_scale=scale).draw(height, width, (0, 0, index))
    assert 0 <= drawn.top < drawn.top + drawn.height <= height
    assert 0 <= drawn.left < drawn.left + drawn.width <= width


# ---- decoding no more than is needed ----


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "grey"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 2}])
def test_only_the_upper_rows_are_decoded_and_they_are_the_same(
    subsampling: str, options: dict[str, Any]
) -> None:
    is_grey = subsampling == "grey"
    image = picture(93, 131).convert("L" if is_grey else "RGB")
    sampled = {} if is_grey else {"subsampling": subsampling}
    content = encoded(image, "JPEG", quality=90, **options, **sampled)
    whole, _ = decode(content, "a.jpg")
    for rows in range(1, 132):
        upper, left_over = decode(content, "a.jpg", rows)
        assert left_over == 0
        assert (upper[:rows] == whole[:rows]).all()
        assert len(upper) <= rows + 2 or "progressive" in options


def noisy_jpeg(damage: bytes = b"") -> bytes:
    """A JPEG of 200 x 200 pixels; `damage` overwrites data from 70 % of the way down."""
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    content = bytearray(encoded(Image.fromarray(noise), "JPEG", quality=90))
    start = int(0.7 * len(content))
    content[start : start + len(damage)] = damage
    return bytes(content)


def test_damaged_data_is_an_error_where_pillow_is_silent() -> None:
    content = noisy_jpeg(b"\xff\xd3" * 100)  # markers that do not belong there
    Image.open(io.BytesIO(content)).load()
    with pytest.raises(UserError, match=r"a\.jpg: cannot be read as an image .*premature end"):
        decode(content, "a.jpg")
    assert decode(content, "a.jpg", rows=100)[1] == 0, "the damage is below"


@pytest.mark.parametrize(
    "damage",
    [bytes(64), np.random.default_rng(2).integers(0, 255, 64, np.uint8).tobytes(), None],
    ids=["zeros", "random bytes", "one bit"],
)
def test_data_left_over_is_counted(damage: bytes | None) -> None:
    """What most damage looks like; so do bytes that some program left."""
    plain = noisy_jpeg()
    content = noisy_jpeg(damage or bytes([plain[int(0.7 * len(plain))] ^ 8]))
    # Only the first epoch's crops are sure to come with all of the file.
    whole, out = a_transform(24, random_crop_scale=(1, 1)), empty_batch(1, 24, 24)[0]
    assert whole(content, "a.jpg", (0, 0, 0), out) == validate(content, 24, 24)[1] > 0


def test_bytes_that_do_not_belong_there() -> None:
    """They are left over, or damage before a restart; behind the end nobody looks."""
    plain = encoded(picture(), "JPEG")
    image, left_over = decode(plain[:-2] + bytes(50) + plain[-2:], "a.jpg")
    assert 40 < left_over <= 50
    for content in (plain, plain + bytes(50)):
        assert (decode(content, "a.jpg")[0] == image).all()
    restarts = encoded(picture(93, 131), "JPEG", quality=90, restart_marker_blocks=2)
    with pytest.raises(UserError, match="extraneous bytes before marker 0xd3"):
        decode(restarts.replace(b"\xff\xd3", bytes(50) + b"\xff\xd3", 1), "a.jpg")


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("size", [(20, 30), (64, 50), (131, 93), (200, 150)])
def test_resizing_is_pillows(interpolation: str, size: tuple[int, int]) -> None:
    source = picture(93, 131)
    out = empty_batch(1, *size)[0]
    resize(np.array(source), out, interpolation)
    theirs = source.resize(size[::-1], getattr(Image.Resampling, interpolation.upper()))
    assert abs(array(theirs) - out.permute(1, 2, 0).numpy()).max() <= 1
