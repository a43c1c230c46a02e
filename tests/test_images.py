"""Decoding what image folders really hold, and augmentation that its key alone decides."""

import io
import multiprocessing
import pickle
import random
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import ks_2samp
from test_optimizers import needs_timm
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from recipe.data import images
from recipe.data.images import (
    AUTO_AUGMENTS,
    INTERPOLATIONS,
    MEAN_COLOR,
    Draw,
    Key,
    TrainTransform,
    ValTransform,
    _decode_jpeg,
    decode,
    decode_and_look,
    empty_batch,
    image_size,
    resize,
)
from recipe.errors import UserError

WIDTH, HEIGHT = 61, 47
TIMMS = pytest.param("rand-m7-mstd0.5-inc1", marks=needs_timm)
AUGMENTS = [None, *AUTO_AUGMENTS, TIMMS]


def picture(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """A smooth, asymmetric picture: each flip, turn, crop or swap of channels shows."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * x / width, 255 * y / height, 128 + 100 * np.sin(x * y / 300)], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


def array(image: Image.Image | np.ndarray) -> np.ndarray:
    return np.asarray(image).astype(int)


def read_image(path: Path) -> np.ndarray:
    image = decode(path.read_bytes(), str(path))
    assert (image.dtype, image.shape[2]) == (np.uint8, 3)
    return image


def encoded(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def augment(image: Image.Image, transform: TrainTransform, *key: int) -> Tensor:
    out = empty_batch(1, transform.size, transform.size)[0]
    transform(encoded(image), "a.png", cast(Key, key), out)
    return out


def validate(image: Image.Image, transform: ValTransform) -> Tensor:
    out = empty_batch(1, transform.crop, transform.crop)[0]
    transform(encoded(image), "a.png", out)
    return out


# ---- decoding ----


def save(image: Image.Image, path: Path, image_format: str, **options: Any) -> Path:
    image.save(path, image_format, **options)
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Two threads each for tests and loader workers would only fight over the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    """A warning for each odd file of 1.28 million would bury everything else."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "BMP", "TIFF", "PPM"])
def test_content_counts_not_the_suffix(tmp_path: Path, image_format: str) -> None:
    options = {"lossless": True} if image_format == "WEBP" else {}
    image = read_image(save(picture(), tmp_path / "a.JPEG", image_format, **options))
    assert (array(image) == array(picture())).all()


def test_jpeg(tmp_path: Path) -> None:
    image = read_image(save(picture(), tmp_path / "a.jpg", "JPEG", quality=95))
    assert image.shape == (HEIGHT, WIDTH, 3)
    assert abs(array(image) - array(picture())).mean() < 3


def test_cmyk_as_adobe_writes_it_and_without_its_marker(tmp_path: Path) -> None:
    file = save(picture().convert("CMYK"), tmp_path / "a.JPEG", "JPEG", quality=95)
    content = file.read_bytes()
    marker = content.index(b"\xff\xee")
    assert content[marker + 4 : marker + 9] == b"Adobe"
    with Image.open(file) as stored:
        assert stored.mode == "CMYK"
    assert abs(array(read_image(file)) - array(picture())).mean() < 5
    length = int.from_bytes(content[marker + 2 : marker + 4], "big")
    file.write_bytes(content[:marker] + content[marker + 2 + length :])
    assert abs(array(read_image(file)) - array(picture())).mean() < 5


def test_grey(tmp_path: Path) -> None:
    grey = picture().convert("L")
    image = read_image(save(grey, tmp_path / "a.png", "PNG"))
    assert (array(image) == array(grey)[:, :, None]).all()
    image = read_image(save(grey, tmp_path / "a.jpg", "JPEG"))
    assert (image == image[:, :, :1]).all()
    black_and_white = grey.convert("1")
    image = read_image(save(black_and_white, tmp_path / "b.png", "PNG"))
    assert set(np.unique(array(image))) == {0, 255}


@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_its_upper_bits(tmp_path: Path, image_format: str) -> None:
    levels = np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH)
    image = read_image(save(Image.fromarray(levels), tmp_path / "a.JPEG", image_format))
    assert (array(image) == (levels >> 8)[:, :, None]).all()


def test_transparency_is_dropped(tmp_path: Path) -> None:
    clear = picture().convert("RGBA")
    clear.putalpha(Image.new("L", clear.size, 7))
    assert (array(read_image(save(clear, tmp_path / "a.png", "PNG"))) == array(picture())).all()
    palette = picture().quantize(16)
    expected = array(palette.convert("RGB"))
    for transparency in (3, bytes(range(0, 160, 10))):
        file = save(palette, tmp_path / "p.png", "PNG", transparency=transparency)
        assert (array(read_image(file)) == expected).all()
    grey = read_image(save(picture().convert("LA"), tmp_path / "la.png", "PNG"))
    assert (array(grey) == array(picture().convert("L"))[:, :, None]).all()


def test_exif_orientation_is_ignored(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    turned = read_image(save(picture(), tmp_path / "a.jpg", "JPEG", exif=exif, quality=95))
    plain = read_image(save(picture(), tmp_path / "b.jpg", "JPEG", quality=95))
    assert (array(turned) == array(plain)).all()


def test_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert read_image(tmp_path / "a.gif")[4, 4].tolist() == [255, 0, 0]


@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_truncated_file_is_a_user_error_that_names_it(tmp_path: Path, image_format: str) -> None:
    buffer = io.BytesIO()
    picture().save(buffer, image_format)
    content = buffer.getvalue()
    file = tmp_path / "n01440764_1.JPEG"
    # The last 21 bytes of a PNG are checksums and an end marker: without them no pixel is lost.
    for length in [*range(1, len(content) - 22, 41), len(content) - 22]:
        file.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"n01440764_1\.JPEG: cannot be read"):
            read_image(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"GIF89a", "cannot be read as an image"),
        (b"\xff\xd8\xff", r"of no known format"),
        (b"no image", "of no known format"),
        (b"\n<!DOCTYPE html><html>404</html>", "a page of text"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_file_that_is_no_image(content: bytes, words: str) -> None:
    with pytest.raises(UserError, match=rf"^a\.jpg: .*{words}") as error:
        decode(content, "a.jpg")
    assert "object at" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_too_many_pixels_are_refused_before_they_are_decoded(
    image_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One limit for all formats; as it is set, an image may be larger than Pillow warns of."""
    content = encoded(picture(), image_format)
    monkeypatch.setattr(images, "MAX_PIXELS", WIDTH * HEIGHT)
    decode(content, "a.jpg")
    monkeypatch.setattr(images, "MAX_PIXELS", WIDTH * HEIGHT - 1)
    monkeypatch.setattr(Image.Image, "load", None)
    monkeypatch.setattr(images.simplejpeg, "decode_jpeg", None)
    transform, out = TrainTransform(24), empty_batch(1, 24, 24)[0]
    for look in (decode, image_size, lambda *given: transform(*given, (0, 0, 0), out)):
        with pytest.raises(UserError, match=r"a\.jpg: has 61 x 47 pixels, and 2,866 are the limit"):
            look(content, "a.jpg")


def test_the_limit_on_pixels_is_below_what_a_jpeg_can_claim() -> None:
    large = bytearray(encoded(picture(), "JPEG"))
    at = images._height_position(bytes(large))
    assert at is not None
    large[at : at + 4] = (30_000).to_bytes(2, "big") * 2
    with pytest.raises(UserError, match="30,000 x 30,000 pixels"):
        decode(bytes(large), "a.jpg")
    bomb = b"P6 13000 13000 255\n"  # larger than Pillow's first limit, which only warns
    assert image_size(bomb, "a.ppm") == (13_000, 13_000)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**63), st.integers(1, 40), st.sampled_from(["JPEG", "PNG", "GIF", "TIFF"]))
def test_damaged_bytes_raise_nothing_but_user_errors(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_bytes: int, image_format: str
) -> None:
    buffer = io.BytesIO()
    picture().save(buffer, image_format)
    content = np.frombuffer(buffer.getvalue(), dtype=np.uint8).copy()
    rng = np.random.default_rng(seed)
    content[rng.integers(0, len(content), num_bytes)] = rng.integers(0, 256, num_bytes)
    file = tmp_path_factory.getbasetemp() / f"damaged.{image_format}"
    file.write_bytes(content.tobytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read_image(file)
        except UserError as error:
            assert str(file) in str(error)


# ---- transforms ----


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("auto_augment", AUGMENTS)
def test_train_transform_gives_uint8(interpolation: str, auto_augment: str | None) -> None:
    transform = TrainTransform(
        24, interpolation=interpolation, auto_augment=auto_augment, erase_probability=0.5
    )
    for index in range(5):
        out = augment(picture(), transform, 0, 0, index)
        assert (out.shape, out.dtype) == ((3, 24, 24), torch.uint8)


@needs_timm
def test_timms_rand_augment_is_timms() -> None:
    """With the settings of timm's own transforms, and drawn from the same generators."""
    from timm.data.transforms_factory import transforms_imagenet_train

    notation, image = "rand-m7-mstd0.5-inc1", picture(160, 160)
    ours = TrainTransform(160, interpolation="bicubic", auto_augment=notation).after_crop[1]
    theirs = transforms_imagenet_train(
        160, interpolation="bicubic", auto_augment=notation, separate=True
    )[1].transforms[0]
    for seed in range(20):
        torch.manual_seed(seed)
        changed = ours(image)
        torch.manual_seed(seed)
        drawn = int(torch.randint(2**32, ()))
        random.seed(drawn)
        np.random.seed(drawn)
        assert np.array_equal(changed, theirs(image))


def test_crop_flip_and_scale() -> None:
    whole = TrainTransform(HEIGHT, scale=(1, 1), ratio=(1, 1), flip_probability=0)
    square = picture(HEIGHT, HEIGHT)
    expected = torch.from_numpy(np.array(square)).permute(2, 0, 1)
    assert torch.equal(augment(square, whole, 1, 2, 3), expected)
    flipped = TrainTransform(HEIGHT, scale=(1, 1), ratio=(1, 1), flip_probability=1)
    assert torch.equal(augment(square, flipped, 1, 2, 3), expected.flip(2))
    half = TrainTransform(HEIGHT, scale=(1, 1), ratio=(1, 1), flip_probability=0.5)
    is_flipped = [not torch.equal(augment(square, half, 0, 0, i), expected) for i in range(400)]
    assert 160 < sum(is_flipped) < 240


def test_erasing_fills_a_rectangle_with_the_mean_color() -> None:
    image = Image.new("RGB", (64, 64), (255, 0, 0))
    always = TrainTransform(32, erase_probability=1)
    out = augment(image, always, 0, 0, 0)
    mean = torch.tensor(MEAN_COLOR, dtype=torch.uint8)[:, None, None]
    is_erased = (out == mean).all(dim=0)
    assert 0.01 < is_erased.float().mean() < 0.4
    rows, columns = is_erased.any(dim=1), is_erased.any(dim=0)
    assert is_erased.sum() == rows.sum() * columns.sum()
    assert (out[:, ~is_erased] == torch.tensor([[255], [0], [0]])).all()
    own = augment(image, TrainTransform(32, erase_probability=1, erase_color=(1, 2, 3)), 0, 0, 0)
    assert own[:, is_erased].unique(dim=1).flatten().tolist() == [1, 2, 3]
    mean_after_normalisation = (np.array(MEAN_COLOR) / 255 - [0.485, 0.456, 0.406]) / 0.225
    assert abs(mean_after_normalisation).max() < 0.01


def test_val_transform_resizes_the_short_side_and_crops_the_centre() -> None:
    out = validate(picture(96, 64), ValTransform(32, 24))
    assert (out.shape, out.dtype) == ((3, 24, 24), torch.uint8)
    resized = array(picture(96, 64).resize((48, 32), Image.Resampling.BILINEAR))
    assert abs(out.permute(1, 2, 0).numpy() - resized[4:28, 12:36]).max() <= 1
    assert torch.equal(validate(picture(96, 64), ValTransform(32, 24)), out)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrainTransform(0),
        lambda: TrainTransform(8, scale=(0.5, 0.2)),
        lambda: TrainTransform(8, scale=(0, 1)),
        lambda: TrainTransform(8, ratio=(2, 1)),
        lambda: TrainTransform(8, flip_probability=1.5),
        lambda: TrainTransform(8, erase_probability=-0.1),
        lambda: TrainTransform(8, interpolation="cubic"),
        lambda: TrainTransform(8, auto_augment="randaugment"),
        lambda: TrainTransform(8, auto_augment="ra", ra_magnitude=31),
        lambda: TrainTransform(8, auto_augment="augmix", augmix_severity=0),
        lambda: ValTransform(8, 9),
        lambda: ValTransform(8, 0),
        lambda: ValTransform(8, 8, interpolation="bicubisch"),
    ],
)
def test_wrong_settings_are_user_errors(make: Any) -> None:
    with pytest.raises(UserError):
        make()


# ---- one key, one result ----


def full_transform(auto_augment: str | None) -> Any:
    return TrainTransform(16, auto_augment=auto_augment, erase_probability=0.5)


class Keys(Dataset[Tensor]):
    def __init__(self, auto_augment: str | None) -> None:
        self.transform = full_transform(auto_augment)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        torch.rand(index)  # whatever a worker drew before must not matter
        return augment(picture(), self.transform, 3, 4, index)


@pytest.mark.parametrize("auto_augment", AUGMENTS)
def test_same_pixels_whatever_was_drawn_before(auto_augment: str | None) -> None:
    transform = full_transform(auto_augment)
    expected = [augment(picture(), transform, 3, 4, index) for index in range(30)]
    for index in reversed(range(30)):
        torch.manual_seed(index)
        torch.randn(index)  # an odd count leaves half a pair of normals in the generator
        random.seed(index)
        np.random.seed(index)
        assert torch.equal(augment(picture(), transform, 3, 4, index), expected[index])


@pytest.mark.parametrize("auto_augment", [None, "ta_wide", TIMMS])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_same_pixels_in_loader_workers(auto_augment: str | None, num_workers: int) -> None:
    keys = Keys(auto_augment)
    expected = torch.stack([keys[index] for index in range(len(keys))])
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of fork beside torch's threads
        loader = DataLoader(
            keys, batch_size=2, num_workers=num_workers, multiprocessing_context=context
        )
        assert torch.equal(torch.cat(list(loader)), expected)


@pytest.mark.parametrize("auto_augment", AUGMENTS)
def test_transforms_travel_to_a_worker_that_was_not_forked(auto_augment: str | None) -> None:
    keys = Keys(auto_augment)
    assert torch.equal(pickle.loads(pickle.dumps(keys))[5], keys[5])


def test_each_part_of_the_key_counts() -> None:
    transform = full_transform(None)
    keys = [(s, e, i) for s in range(4) for e in range(4) for i in range(4)]
    outs = {augment(picture(), transform, *key).numpy().tobytes() for key in keys}
    assert len(outs) == len(keys)
    huge = augment(picture(), transform, 2**63, 10**6, 2**40)
    assert not torch.equal(huge, augment(picture(), transform, 0, 10**6, 2**40))


@pytest.mark.parametrize("auto_augment", AUGMENTS)
def test_other_random_streams_are_left_alone(auto_augment: str | None) -> None:
    """Torch's is put back, and timm puts back Python's and numpy's, which nothing else touches."""
    transform = full_transform(auto_augment)
    torch.randn(1)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state(legacy=False))
    for index in range(30):
        augment(picture(), transform, 1, 2, index)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert repr(np.random.get_state(legacy=False)) == before[2]


def test_stream_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(image: Tensor) -> Tensor:
        torch.rand(3)
        raise ZeroDivisionError

    transform = full_transform(None)
    object.__setattr__(transform, "after_crop", (broken,))
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        augment(picture(), transform, 1, 2, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_are_pinned() -> None:
    """Changed draws would give a resumed run other pixels than it began with."""
    drawn = TrainTransform(224).draw(375, 500, (42, 7, 1_281_166))
    assert drawn == Draw(top=4, left=0, height=214, width=205, flip=True, seed=448228455)


def test_draws_are_those_of_random_resized_crop() -> None:
    """Sizes, places and flips have the distribution of torchvision's transform."""
    theirs = v2.RandomResizedCrop(24)
    image = torch.empty(3, 75, 100)
    torch.manual_seed(0)
    expected = [theirs.make_params([image]) for _ in range(4000)]
    drawn = [TrainTransform(24).draw(75, 100, (0, 0, index)) for index in range(4000)]
    for name in ("top", "left", "height", "width"):
        a, b = [p[name] for p in expected], [getattr(d, name) for d in drawn]
        assert ks_2samp(a, b).pvalue > 0.001
    assert 0.46 < np.mean([d.flip for d in drawn]) < 0.54


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(lambda t: (min(t), max(t))),
    st.integers(0, 2**40),
)
def test_crops_lie_within_the_image(
    height: int, width: int, scale: tuple[float, float], index: int
) -> None:
    drawn = TrainTransform(24, scale=scale).draw(height, width, (0, 0, index))
    assert 0 <= drawn.top < drawn.top + drawn.height <= height
    assert 0 <= drawn.left < drawn.left + drawn.width <= width


# ---- decoding no more than is needed ----


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 2}])
def test_only_the_upper_rows_are_decoded_and_they_are_the_same(
    subsampling: str, options: dict[str, Any]
) -> None:
    content = encoded(picture(93, 131), "JPEG", subsampling=subsampling, quality=90, **options)
    whole = decode(content, "a.jpg")
    for rows in range(1, 132):
        upper, left_over = _decode_jpeg(content, 131, 93, rows)
        assert left_over == 0
        assert (upper[:rows] == whole[:rows]).all()
        if not options.get("progressive"):
            assert len(upper) <= rows + 2


def test_of_a_grey_jpeg_too() -> None:
    content = encoded(picture(93, 131).convert("L"), "JPEG", quality=90)
    whole = decode(content, "a.jpg")
    assert (_decode_jpeg(content, 131, 93, 40)[0][:40] == whole[:40]).all()


def noisy_jpeg(damage: bytes = b"") -> bytes:
    """A JPEG of 200 x 200 pixels; `damage` overwrites data from 70 % of the way down."""
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    content = bytearray(encoded(Image.fromarray(noise), "JPEG", quality=90))
    start = int(0.7 * len(content))
    content[start : start + len(damage)] = damage
    return bytes(content)


def augment_whole(content: bytes, epoch: int) -> int:
    whole = TrainTransform(24, scale=(1, 1), ratio=(1, 1))
    return whole(content, "a.jpg", (0, epoch, 0), empty_batch(1, 24, 24)[0])


def test_damaged_data_is_an_error_where_pillow_is_silent() -> None:
    content = noisy_jpeg(b"\xff\xd3" * 100)  # markers that do not belong there
    Image.open(io.BytesIO(content)).load()
    with pytest.raises(UserError, match=r"a\.jpg: cannot be read as an image .*premature end"):
        decode(content, "a.jpg")
    for epoch in (0, 1):
        with pytest.raises(UserError, match=r"a\.jpg: cannot be read as an image"):
            augment_whole(content, epoch)
    # A crop above the damage: the first epoch looks at the whole file all the same.
    transform = TrainTransform(24, scale=(0.05, 0.05))
    keys = [(0, epoch, index) for epoch in (0, 1) for index in range(500)]
    drawn = {key: transform.draw(200, 200, key) for key in keys}
    above = [key for key, draw in drawn.items() if draw.top + draw.height < 100]
    assert {epoch for _, epoch, _ in above} == {0, 1}
    for key in above:
        out = empty_batch(1, 24, 24)[0]
        if key[1] == 0:
            with pytest.raises(UserError, match="premature end"):
                transform(content, "a.jpg", key, out)
        else:
            transform(content, "a.jpg", key, out)


@pytest.mark.parametrize("damage", ["zeros", "random bytes", "one bit"])
def test_data_left_over_is_an_error(damage: str) -> None:
    """What most damage looks like; so do bytes that some program left."""
    content = noisy_jpeg(bytes(64))
    if damage == "random bytes":
        content = noisy_jpeg(np.random.default_rng(2).integers(0, 255, 64, np.uint8).tobytes())
    if damage == "one bit":
        plain = noisy_jpeg()
        content = noisy_jpeg(bytes([plain[int(0.7 * len(plain))] ^ 8]))
    with pytest.raises(UserError, match=r"a\.jpg: [\d,]+ bytes more than its pixels need"):
        decode(content, "a.jpg")
    # Only the first epoch's crops are sure to come with all of the file.
    left_over = augment_whole(content, epoch=0)
    assert left_over > 0
    assert validate_bytes(content) == left_over


def validate_bytes(content: bytes) -> int:
    return ValTransform(24, 24)(content, "a.jpg", empty_batch(1, 24, 24)[0])


def test_bytes_behind_the_image() -> None:
    plain = encoded(picture(), "JPEG")
    assert plain.endswith(b"\xff\xd9")
    image, left_over = decode_and_look(plain[:-2] + bytes(50) + plain[-2:], "a.jpg")
    assert 40 < left_over <= 50
    assert (image == decode(plain, "a.jpg")).all()
    # What follows the image's end is not looked at.
    assert (decode(plain + bytes(50), "a.jpg") == image).all()


def test_data_left_over_before_a_restart_is_damage() -> None:
    content = bytearray(encoded(picture(93, 131), "JPEG", quality=90, restart_marker_blocks=2))
    restart = content.index(b"\xff\xd3")
    content[restart:restart] = bytes(50)
    with pytest.raises(UserError, match="extraneous bytes before marker 0xd3"):
        decode(bytes(content), "a.jpg")


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("size", [(20, 30), (64, 50), (131, 93), (200, 150)])
def test_resizing_is_pillows(interpolation: str, size: tuple[int, int]) -> None:
    source = picture(93, 131)
    out = empty_batch(1, *size)[0]
    resize(np.array(source), out, interpolation)
    theirs = source.resize(size[::-1], getattr(Image.Resampling, interpolation.upper()))
    assert abs(array(theirs) - out.permute(1, 2, 0).numpy()).max() <= 1
