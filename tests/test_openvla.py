"""OpenVLA and OpenVLA-OFT on tiny random checkpoints in the upstream format: the model, its
tokens and its image path."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contracts import check_policy, random_observation
from openvla_checkpoints import IMAGE, STATISTICS, libero_like, random_weights, write_checkpoint
from PIL import Image

from benchmarks.policy.openvla import generate_tokens, tokens_without_reuse
from policies.openvla import OpenVLA, OpenVLAConfig, OpenVLAL1
from policies.openvla import images as image_path
from policies.openvla.model import stock_llama
from policies.openvla.tokens import ActionCodec, PromptTokenizer
from vla_rl.errors import ConfigError, EmbodimentMismatch, MissingPackage, UserError
from vla_rl.types import Observation

PLAIN = {"precision": "float32", "chunk_length": 2}
AUTOREGRESSIVE = {**PLAIN, "decoding": "autoregressive"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("openvla") / "oft")


@pytest.fixture(scope="module")
def folder_with_parts(tmp_path_factory):
    return write_checkpoint(
        tmp_path_factory.mktemp("openvla") / "l1", parts=("proprio_projector", "action_head")
    )


def load(folder, kind=OpenVLA, **options):
    return kind.from_pretrained(folder, libero_like(), **{**PLAIN, **options})


def observe(b: int = 3) -> Observation:
    """Rows whose prompts differ in length."""
    texts = ("open the drawer", "put the black bowl on the plate", "push")
    return dataclasses.replace(random_observation(libero_like(), b), instruction=texts[:b])


# ------------------------------------------------------------------------------------ action tokens
def codec(**changes) -> ActionCodec:
    options = {"bins": 256, "normalization": "q99", "gripper": "none", "unit": False, **changes}
    return ActionCodec.from_statistics(
        STATISTICS["libero_spatial_no_noops"]["action"], libero_like(), **options
    )


def test_every_action_token_survives_the_round_trip():
    one = codec()
    index = torch.arange(256)
    actions = one.table().T  # [256 7]
    again = one.encode(actions)
    # ids 31744 and 31745 (index 0 and 1) share the last of the 255 centres, so the value leads back
    # to one of them
    expected = index.clamp(min=1)[:, None].expand(-1, 7)
    torch.testing.assert_close(again, expected)
    torch.testing.assert_close(one.table().T[again, torch.arange(7)], actions)


def test_token_values_are_those_of_upstream():
    # edges -1, -1 + 2/255, ...: id 31999 is d = 1, the lowest centre, 1/255 above the lowest edge
    one = codec()
    assert one.normalized_of_index(np.array([255]))[0] == pytest.approx(-1 + 1 / 255)
    np.testing.assert_allclose(one.normalized_of_index(np.array([0, 1])), [1 - 1 / 255] * 2)
    assert one.normalized_of_index(np.array([128]))[0] == pytest.approx(0.0)
    # x = -0.5 lies in d = floor(0.5 / (2/255)) + 1 = 64, so id 31936, which is index 192
    physical = 0.5 * (-0.5 + 1) * (0.9 + 0.8 + 1e-8) - 0.8
    assert int(one.encode(torch.full((7,), physical))[0]) == 31936 - 31744


def test_normalisation_golden_values():
    one = codec()
    # dimension 1: q01 -0.6, q99 0.7; 2 (0.375 + 0.6) / 1.3 - 1 = 0.5; the gripper (mask False)
    # passes as it is
    action = np.array([2.0, 0.375, -0.4, 0.2, -0.1, 0.0, 0.75])
    np.testing.assert_allclose(
        one.to_normalized(action), [1.0, 0.5, -1.0, 1.0, -1.0, 0.0, 0.75], atol=1e-7
    )
    np.testing.assert_allclose(
        one.to_physical(np.full(7, 0.5)), [0.475, 0.375, 0.275, 0.1, 0.05, 0.15, 0.5], atol=1e-7
    )
    constant = dataclasses.replace(one, low=np.full(7, 0.3), high=np.full(7, 0.3))
    np.testing.assert_array_equal(constant.to_normalized(np.full(7, 0.3))[:6], np.zeros(6))


def test_gripper_and_units_of_libero():
    one = codec(gripper="libero", unit=True)
    # the model says 1 open, 0 closed; LIBERO wants -1 open, +1 closed: g <- -sign(2 g - 1)
    for said, wanted in ((1.0, -1.0), (0.9, -1.0), (0.2, 1.0), (0.0, 1.0)):
        assert one.to_physical(np.array([0.0] * 6 + [said]))[6] == wanted
    closed_open = np.array([[0.0] * 6 + [1.0], [0.0] * 6 + [-1.0]])
    assert one.to_normalized(closed_open)[:, 6].tolist() == [0.0, 1.0]
    scaled = dataclasses.replace(libero_like(), action_low=(-0.05,) * 7, action_high=(0.05,) * 7)
    metres = dataclasses.replace(codec(gripper="none", unit=True), embodiment=scaled)
    shares = np.array([0.475, 0.375, 0.275, 0.1, 0.05, 0.15])
    np.testing.assert_allclose(metres.to_physical(np.full(7, 0.5))[:6], 0.05 * shares, atol=1e-8)
    np.testing.assert_allclose(
        metres.to_normalized(metres.to_physical(np.full(7, 0.5))), np.full(7, 0.5), atol=1e-6
    )


def test_prompts_of_both_dialects(folder):
    text = (folder / "tokenizer.json").read_text()
    official, rlinf = PromptTokenizer(text), PromptTokenizer(text, dialect="rlinf")
    assert official.text("Open It") == "In: What action should the robot take to open it?\nOut:"
    assert rlinf.text("Open It") == official.text("Open It") + " "
    for tokenizer in (official, rlinf):
        ids = tokenizer.encode("Open It")
        assert ids[0] == 1 and ids[-1] == 29871 and ids.count(1) == 1 and ids[-2] != 29871
    vicuna = PromptTokenizer(text, prompt="vicuna").text("push")
    assert vicuna.endswith("questions. USER: What action should the robot take to push? ASSISTANT:")


# --------------------------------------------------------------------------------------- image path
def test_lanczos_weights_by_hand():
    # 4 -> 2: the first output lies at 1.0, inputs at 0.5, 1.5, 2.5, 3.5; the kernel is twice as
    # wide. L(1/4) = sinc(1/4) sinc(1/12) = 0.900316 * 0.988616, L(3/4) = 0.300105 * 0.900316,
    # L(5/4) = -0.180063 * 0.737912
    raw = np.array([0.890067, 0.890067, 0.270190, -0.132871])
    np.testing.assert_allclose(image_path.lanczos_matrix(4, 2)[0], raw / raw.sum(), atol=2e-6)
    flat = torch.full((1, 3, 256, 256), 77, dtype=torch.uint8)
    assert (image_path.resize_lanczos(flat, 224) == 77).all()


def test_lanczos_agrees_with_pillow():
    # away from the ends, where Pillow clips midway
    image = torch.randint(96, 160, (1, 3, 64, 48), dtype=torch.uint8)
    mine = image_path.resize_lanczos(image, 40)[0].permute(1, 2, 0).numpy()
    pillow = np.asarray(
        Image.fromarray(image[0].permute(1, 2, 0).numpy()).resize(
            (40, 40), Image.Resampling.LANCZOS
        )
    )
    # Pillow rounds between the axes
    assert np.abs(mine.astype(int) - pillow.astype(int)).max() <= 2


def test_center_crop_by_hand():
    # size 5, side sqrt(0.9): samples at 4 ((1 - side) / 2 + side i / 4) = 0.1026, 1.0513, 2,
    # 2.9487, 3.8974
    matrix = image_path.crop_matrix(5, 5)
    side = math.sqrt(0.9)
    first = 2 * (1 - side)
    np.testing.assert_allclose(matrix[0], [1 - first, first, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(matrix[2], [0, 0, 1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(matrix.sum(1), np.ones(5), atol=1e-6)
    # floats go back to uint8 as floor(255.5 x): 128/255 -> 128.25 -> 128, 1 -> 255 (saturated)
    flat = torch.tensor([0, 128, 255], dtype=torch.uint8)[None, :, None, None].expand(1, 3, 8, 8)
    assert image_path.center_crop(flat, 8)[0, :, 0, 0].tolist() == [0, 128, 255]
    # 3 -> 2 at once: samples at the two ends of the box, 2 (1 - side) / 2 and 2 (1 + side) / 2
    np.testing.assert_allclose(
        image_path.crop_matrix(3, 2), [[side, 1 - side, 0], [0, 1 - side, side]], atol=1e-6
    )


def test_official_path_in_order():
    """Rotation, JPEG, Lanczos, crop: equal to the steps one after the other; RLinf's path is the
    resize alone."""
    images = torch.randint(0, 256, (2, 48, 48, 3), dtype=torch.uint8)
    out = image_path.prepare(images, 28, path="jpeg_lanczos", crop=True, rotate=True)
    turned = torch.from_numpy(np.ascontiguousarray(images.numpy()[:, ::-1, ::-1]))
    decoded = image_path.through_jpeg(turned)
    assert (decoded.int() - turned.int()).abs().max() > 0  # noise does not survive JPEG
    stepwise = image_path.center_crop(
        image_path.resize_lanczos(decoded.permute(0, 3, 1, 2), 28), 28
    )
    torch.testing.assert_close(out, stepwise, rtol=0, atol=0)
    # as in an update; eight bits of mantissa are too few for pixels
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = image_path.prepare(images, 28, path="jpeg_lanczos", crop=True, rotate=True)
    torch.testing.assert_close(again, out, rtol=0, atol=0)
    plain = image_path.prepare(images, 28, path="bicubic", crop=True, rotate=False)
    torch.testing.assert_close(
        plain, image_path.resize_bicubic(images.permute(0, 3, 1, 2), 28), rtol=0, atol=0
    )


REFERENCE = json.loads((Path(__file__).parent / "openvla_images.json").read_text())


def recorded(name: str) -> torch.Tensor:
    entry = REFERENCE[name]
    pixels = np.frombuffer(base64.b64decode(entry["pixels"]), np.uint8).reshape(entry["shape"])
    return torch.from_numpy(pixels.copy())


def test_image_paths_give_the_pixels_of_tensorflow():
    """Against a recording of TensorFlow's own decoder, resize and crop; "about" in the file says
    how it was made."""
    y, x, c = np.mgrid[0:20, 0:26, 0:3]
    image = torch.from_numpy(
        ((9 * x + 5 * y * (c + 1) + x * y // 3 + 90 * (x > 12) * c) % 256).astype(np.uint8)
    )[None]
    decoded = image_path.through_jpeg(image)
    assert torch.equal(decoded[0], recorded("decoded"))
    buffer = io.BytesIO()
    Image.fromarray(image[0].numpy()).save(buffer, format="JPEG", quality=95, subsampling="4:2:0")
    accurate = np.asarray(Image.open(buffer)).astype(int)
    # the accurate transform of other decoders is another image
    assert np.abs(accurate - decoded[0].numpy()).max() > 4
    for crop, name in ((False, "resized"), (True, "cropped")):
        out = image_path.prepare(image, 14, path="jpeg_lanczos", crop=crop, rotate=False)
        assert torch.equal(out[0].permute(1, 2, 0), recorded(name)), name
    # RLinf's RoboTwin: the crop alone
    out = image_path.prepare(image, 14, path="pil_bicubic", crop=True, rotate=False)
    assert torch.equal(out[0].permute(1, 2, 0), recorded("cropped_raw"))


def grey_jpeg(coefficients: np.ndarray, quantisers: np.ndarray) -> bytes:
    """A baseline JPEG of one 8 x 8 block from quantised DCT coefficients, by the layout of ITU
    T.81.

    Its Huffman tables give all DC categories 4 bits and all AC symbols 8 bits.
    """
    zigzag = sorted(np.ndindex(8, 8), key=lambda ij: (sum(ij), ij[sum(ij) % 2 == 0]))
    values = [int(coefficients[ij]) for ij in zigzag]
    ac_symbols = [run << 4 | size for run in range(16) for size in range(1, 11)] + [0x00]
    bits = ""

    def put(value: int, code: str) -> str:
        size = abs(value).bit_length()
        return code + (
            format(value if value > 0 else value + (1 << size) - 1, f"0{size}b") if size else ""
        )

    bits += put(values[0], format(abs(values[0]).bit_length(), "04b"))
    run = 0
    for value in values[1:]:
        if value == 0:
            run += 1
            continue
        assert run < 16
        bits += put(value, format(ac_symbols.index(run << 4 | abs(value).bit_length()), "08b"))
        run = 0
    bits += format(ac_symbols.index(0), "08b") if run else ""  # end of block
    bits += "1" * (-len(bits) % 8)
    scan = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)).replace(
        b"\xff", b"\xff\x00"
    )

    def segment(marker: int, *content: int) -> bytes:
        return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + bytes(content)

    dc_table = (0x00, *(0, 0, 0, 12), *[0] * 12, *range(12))
    ac_table = (0x10, *[0] * 7, len(ac_symbols), *[0] * 8, *ac_symbols)
    return (
        b"\xff\xd8"
        + segment(0xDB, 0, *(int(quantisers[ij]) for ij in zigzag))
        + segment(0xC0, 8, 0, 8, 0, 8, 1, 1, 0x11, 0)
        + segment(0xC4, *dc_table)
        + segment(0xC4, *ac_table)
        + segment(0xDA, 1, 1, 0, 0, 63, 0)
        + scan
        + b"\xff\xd9"
    )


def fast_inverse(coefficients: np.ndarray, quantisers: np.ndarray) -> np.ndarray:
    """Pixels of one block by the scaled transform of Arai, Agui and Nakajima in integers, as
    libjpeg's documentation of its fast method describes it: five multiplications a line by
    constants of 8 fractional bits, every product cut off (not rounded), two spare bits between the
    passes, the output cut off as well."""
    factors = np.array([1.0] + [math.sqrt(2) * math.cos(k * math.pi / 16) for k in range(1, 8)])
    scale = np.round(np.outer(factors, factors) * 2**14).astype(int)
    x = coefficients.astype(int) * (quantisers.astype(int) * scale + 2**11 >> 12)

    def times(value: np.ndarray, constant: float) -> np.ndarray:
        return value * round(constant * 256) >> 8

    r, cos = math.sqrt(2), math.cos(math.pi / 8)
    high, low = 2 * cos, 2 * math.sin(math.pi / 8)
    for _ in range(2):  # columns, then rows: transposed twice
        even_sum, even_difference, both = x[0] + x[4], x[0] - x[4], x[2] + x[6]
        middle = times(x[2] - x[6], r) - both
        even = [
            even_sum + both,
            even_difference + middle,
            even_difference - middle,
            even_sum - both,
        ]
        outer_sum, outer_difference, inner_sum, inner_difference = (
            x[1] + x[7],
            x[1] - x[7],
            x[5] + x[3],
            x[5] - x[3],
        )
        shared = times(inner_difference + outer_difference, high)
        seventh = outer_sum + inner_sum
        sixth = times(inner_difference, -(high + low)) + shared - seventh
        fifth = times(outer_sum - inner_sum, r) - sixth
        fourth = times(outer_difference, high - low) - shared + fifth
        odd = [seventh, sixth, fifth, -fourth]
        x = np.stack(
            [e + o for e, o in zip(even, odd)] + [e - o for e, o in zip(even[::-1], odd[::-1])]
        ).T
    return np.clip((x >> 5) + 128, 0, 255)


def test_jpeg_is_decoded_with_the_fast_integer_transform():
    random, differences = np.random.default_rng(0), []
    for _ in range(20):
        quantisers = random.integers(1, 12, (8, 8))
        coefficients = np.round(
            random.normal(0, 60, (8, 8)) / (1 + np.add.outer(range(8), range(8))) / quantisers
        )
        data = grey_jpeg(coefficients, quantisers)
        expected = fast_inverse(coefficients, quantisers)
        decoded = image_path.decode_jpeg(data)
        assert (decoded == expected[..., None]).all()
        differences.append(
            np.abs(np.asarray(Image.open(io.BytesIO(data))).astype(int) - expected).max()
        )
    # the same blocks by the accurate transform: the test can tell them apart
    assert max(differences) >= 2


def test_pillows_bicubic_by_integers():
    """RLinf's loader of official checkpoints: Keys' kernel (a = -1/2) over 22-bit integer weights,
    widened by the scale, the columns first and rounded to uint8 before the rows."""
    image = np.random.default_rng(0).integers(0, 256, (20, 26, 3))
    given = torch.from_numpy(image.astype(np.uint8))[None]

    def kernel(t: np.ndarray) -> np.ndarray:
        t = np.abs(t)
        return np.where(
            t < 1,
            (1.5 * t - 2.5) * t * t + 1,
            np.where(t < 2, ((-0.5 * t + 2.5) * t - 4) * t + 2, 0.0),
        )

    def along(pixels: np.ndarray, size: int) -> np.ndarray:
        """[n in c] → [n size c]."""
        scale, rows = pixels.shape[1] / size, []
        for i in range(size):
            center = (i + 0.5) * scale
            first, last = (
                max(int(center - 2 * scale + 0.5), 0),
                min(int(center + 2 * scale + 0.5), pixels.shape[1]),
            )
            weights = kernel((np.arange(first, last) + 0.5 - center) / scale)
            whole = np.trunc(weights / weights.sum() * 2**22 + np.copysign(0.5, weights)).astype(
                np.int64
            )
            rows.append((np.einsum("nkc,k->nc", pixels[:, first:last], whole) + 2**21) >> 22)
        return np.clip(np.stack(rows, 1), 0, 255)

    expected = along(along(image, 14).transpose(1, 0, 2), 14).transpose(1, 0, 2)
    out = image_path.prepare(given, 14, path="pil_bicubic", crop=False, rotate=False)
    np.testing.assert_array_equal(out[0].permute(1, 2, 0), expected)
    # the way of RLinf's own checkpoints
    assert (image_path.resize_bicubic(given.permute(0, 3, 1, 2), 14) != out).any()


def test_without_the_jpeg_decoder_nothing_stands_in(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(MissingPackage, match=r"jpeg_lanczos needs .*'simplejpeg'.*\[openvla\]"):
        load(folder)
    load(folder, image_path="bicubic").act(observe())


def test_pixels_are_normalised_by_the_files_constants(folder):
    policy = load(folder)
    # tvf_normalize_params wins over means: (128/255 - 0.484375) / 0.228515625 = 0.07696, not the
    # 0.07406 of ImageNet's 0.485
    assert float(
        (128 / 255 - policy.pictures.mean_0[0]) / policy.pictures.std_0[0]
    ) == pytest.approx(0.07696, abs=2e-5)
    assert float(policy.pictures.mean_1[0]) == 0.5


# ---------------------------------------------------------------------------------------- the model
def test_features_are_those_of_timms_second_to_last_block(folder):
    import timm

    policy, weights = load(folder), random_weights()
    pixels = [torch.randn(2, 3, IMAGE, IMAGE) for _ in range(2)]
    expected = []
    names = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
    for name, tower, x in zip(names, ("featurizer", "fused_featurizer"), pixels):
        stock = timm.create_model(
            name, num_classes=0, img_size=IMAGE, embed_dim=16, depth=3, num_heads=2
        )
        prefix = f"vision_backbone.{tower}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        stock.load_state_dict({k.replace("scale_factor", "gamma"): v for k, v in own.items()})
        expected.append(stock.get_intermediate_layers(x, n={len(stock.blocks) - 2})[0])
    torch.testing.assert_close(policy.vision_backbone(pixels), torch.cat(expected, dim=-1))


def reference_logits(
    policy: OpenVLA, observation: Observation, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Row by row, without padding, through transformers' own Llama: logits float32 [b h a 256]."""
    n, rows = policy.action_tokens, []
    llama = stock_llama(policy.language_model)
    embed = llama.model.embed_tokens
    for i in range(len(observation)):
        row = observation[i : i + 1]
        ids = torch.tensor([policy.tokenizer.encode(row.instruction[0])])
        patches = policy._vision_tokens(policy.pictures.pixels(row))
        if policy.config.use_proprio:
            low, high = policy.proprio_low, policy.proprio_high
            state = (2 * (row.proprio - low) / (high - low + 1e-8) - 1).clamp(-1, 1)
            patches = torch.cat([patches, policy.proprio_projector(state)[:, None]], 1)
        x = torch.cat([embed(ids[:, :1]), patches, embed(ids[:, 1:])], 1)
        start = patches.shape[1] + ids.shape[1] - 1
        if policy.config.decoding == "parallel":
            x = torch.cat([x, torch.zeros(1, n, x.shape[2])], 1)
            if policy.config.dialect == "official":
                x = torch.cat([x, embed(torch.tensor([[2]]))], 1)
        else:
            x = torch.cat([x, embed(tokens[i].flatten()[None, :-1].long() + 31744)], 1)
        length = x.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool)
        asked = (policy.config.decoding, policy.config.attention)
        seen = (
            seen.tril() if asked in (("autoregressive", "auto"), ("parallel", "causal")) else seen
        )
        mask = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
        logits = llama(inputs_embeds=x, attention_mask=mask, use_cache=False).logits
        rows.append(logits[:, start : start + n, -320:-64])
    return torch.cat(rows).view(len(observation), policy.chunk_length, 7, 256)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cameras": ["agentview", "wrist"]},
        {"dialect": "rlinf"},
        {"dialect": "rlinf", "attention": "causal", "image_path": "jpeg_lanczos"},
        {"attention": "causal", "image_path": "pil_bicubic"},
        {"decoding": "autoregressive"},
    ],
    ids=["official", "two_cameras", "rlinf", "rlinf_causal", "official_causal", "autoregressive"],
)
def test_batched_logits_equal_a_loop_over_rows(folder, options, tmp_path):
    if len(options.get("cameras", ())) == 2:
        folder = write_checkpoint(tmp_path, num_images_in_input=2)
    policy, observation = load(folder, **options), observe()
    tokens = torch.randint(0, 256, (3, 2, 7))
    logits, _ = policy.action_logits(observation, tokens)
    torch.testing.assert_close(
        logits, reference_logits(policy, observation, tokens), rtol=1e-4, atol=1e-4
    )
    # the way without a mask
    same_length = dataclasses.replace(observation, instruction=("push it",) * 3)
    logits, _ = policy.action_logits(same_length, tokens)
    torch.testing.assert_close(
        logits, reference_logits(policy, same_length, tokens), rtol=1e-4, atol=1e-4
    )


def test_proprio_is_one_normalised_token_behind_the_patches(folder_with_parts, tmp_path):
    policy = load(write_checkpoint(tmp_path, parts=("proprio_projector",)), use_proprio=True)
    observation = observe()
    torch.testing.assert_close(
        policy.action_logits(observation)[0],
        reference_logits(policy, observation),
        rtol=1e-4,
        atol=1e-4,
    )
    moved = dataclasses.replace(observation, proprio=observation.proprio + 0.5)
    assert (
        policy.action_logits(moved)[0] - policy.action_logits(observation)[0]
    ).abs().max() > 1e-3


def test_the_dialects_differ(folder):
    observation = observe()
    logits = [
        load(folder, dialect=d, image_path="bicubic").action_logits(observation)[0]
        for d in ("official", "rlinf")
    ]
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_cached_decoding_equals_decoding_without_a_cache(folder):
    policy, observation = load(folder, decoding="autoregressive"), observe()
    cached = policy.act(observation, deterministic=True)
    tokens = torch.zeros(3, 2, 7, dtype=torch.long)
    for s in range(14):  # the whole sequence again for every token
        logits, _ = policy.action_logits(observation, tokens)
        tokens.view(3, 14)[:, s] = logits.view(3, 14, 256)[:, s].argmax(-1)
    assert torch.equal(cached.replay["action_tokens"].long(), tokens)
    replayed = policy.evaluate(observation, cached.replay)
    torch.testing.assert_close(replayed.log_prob, cached.behavior_log_prob, rtol=0, atol=1e-4)


def test_cached_decoding_equals_transformers_generate(tmp_path):
    folder = write_checkpoint(tmp_path, chunk_length=None)
    policy, observation = load(folder, decoding="autoregressive", chunk_length=1), observe()
    mine = policy.act(observation, deterministic=True).replay["action_tokens"].view(3, 7)
    assert len(set(mine[0].tolist())) > 2  # no trivial sequence
    for i in range(3):
        for plain in (generate_tokens, tokens_without_reuse):
            tokens = plain(policy, stock_llama(policy.language_model), observation[i : i + 1])
            assert tokens[0].tolist() == mine[i].tolist()


@pytest.mark.parametrize(
    "options",
    [{}, {"value_head": True}, AUTOREGRESSIVE, AUTOREGRESSIVE | {"value_head": True}],
    ids=["parallel", "value", "autoregressive", "autoregressive_value"],
)
def test_policy_contract(folder, options):
    check_policy(load(folder, **options), observe())
    check_policy(load(folder, **options))


def test_log_probs_are_on_the_action_slice_at_the_temperature(folder):
    policy, observation = load(folder, temperature=1.6), observe()
    output = policy.act(observation, seeds=[1, 2, 3])
    logits = reference_logits(policy, observation) / 1.6
    tokens = output.replay["action_tokens"].long()
    expected = F.log_softmax(logits, -1).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(output.behavior_log_prob, expected, rtol=0, atol=1e-4)
    policy.temperature = 0.5
    again = policy.evaluate(observation, output.replay).log_prob
    expected = F.log_softmax(logits * 1.6 / 0.5, -1).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-3)


def test_pixels_can_be_kept_with_the_decision(folder):
    policy, observation = load(folder, replay_pixels=True), observe()
    output = policy.act(observation, deterministic=True)
    assert (
        output.replay["pixels"].shape == (3, 1, 3, IMAGE, IMAGE)
        and output.replay["pixels"].dtype == torch.uint8
    )
    black = dataclasses.replace(
        observation, images={k: torch.zeros_like(v) for k, v in observation.images.items()}
    )
    kept = policy.evaluate(black, output.replay).log_prob
    torch.testing.assert_close(kept, policy.evaluate(observation, output.replay).log_prob)


def test_value_is_read_where_the_first_action_token_is_predicted(folder):
    policy = load(folder, value_head=True)
    with torch.no_grad():
        policy.value_head.mlp[4].weight.normal_()
    observation = observe()
    batched = policy.act(observation, deterministic=True).value
    alone = torch.cat(
        [policy.act(observation[i : i + 1], deterministic=True).value for i in range(3)]
    )
    torch.testing.assert_close(batched, alone, rtol=1e-4, atol=1e-4)
    assert {id(p) for p in policy.value_parameters()} == {
        id(p) for p in policy.value_head.parameters()
    }


# ----------------------------------------------------------------------------------------- learning
def test_imitation_lowers_the_loss_of_the_given_actions(folder):
    policy, observation = load(folder), observe()
    actions, valid = (
        torch.rand(3, 2, 7) * 0.4 - 0.2,
        torch.tensor([[True, True], [True, False], [True, True]]),
    )
    actions[..., 6] = actions[..., 6].sign()
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(30):
        loss, metrics = policy.imitation_loss(observation, actions, valid)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # log(32064) = 10.4 at first: the whole vocabulary competes
    assert losses[0] > 8 and losses[-1] < losses[0] / 2
    assert metrics["accuracy"] > 0.3 and set(metrics) == {"nll", "accuracy", "mae", "entropy"}


def test_imitation_ignores_steps_that_are_not_valid(folder):
    policy, observation = load(folder), observe()
    actions, valid = torch.zeros(3, 2, 7), torch.tensor([[True, False]] * 3)
    changed = actions.clone()
    changed[:, 1] = 0.7
    first, _ = policy.imitation_loss(observation, actions, valid)
    second, _ = policy.imitation_loss(observation, changed, valid)
    assert float(first.detach()) == float(second.detach())


def test_checkpointing_and_freezing_change_no_result(folder):
    observation, plain = observe(), load(folder)
    replay = plain.act(observation, deterministic=True).replay
    saving = load(folder, gradient_checkpointing=True)
    frozen = load(folder, freeze_vision=True)
    for policy in (plain, saving, frozen):
        policy.evaluate(observation, replay).log_prob.sum().backward()
    mine = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in saving.named_parameters():
        if mine[name] is not None:
            torch.testing.assert_close(p.grad, mine[name])
    unused = {n for n, p in plain.named_parameters() if not p.requires_grad}
    assert unused and all("blocks.2." in n or ".norm." in n or "attn_pool" in n for n in unused)
    assert all(
        (p.grad is None) == n.startswith("vision_backbone") for n, p in frozen.named_parameters()
    )


def test_l1_head_acts_and_learns(tmp_path):
    folder = write_checkpoint(
        tmp_path, parts=("proprio_projector", "action_head"), num_images_in_input=2
    )
    policy = load(folder, OpenVLAL1, use_proprio=True, cameras=["agentview", "wrist"])
    observation = observe()
    output = policy.act(observation)
    assert output.chunk.actions.shape == (3, 2, 7)
    assert set(output.chunk.actions[..., 6].unique().tolist()) <= {-1.0, 1.0}
    alone = policy.act(observation[1:2]).chunk.actions
    torch.testing.assert_close(alone, output.chunk.actions[1:2], rtol=1e-4, atol=1e-4)
    # hidden states of a control step joined -> LayerNorm -> Linear -> ReLU -> 2 residual blocks ->
    # LayerNorm -> Linear
    hidden = policy.sequences.parallel(policy.prefix(observation))
    x, head = hidden.reshape(3, 2, 7 * 32), policy.action_head.model
    x = F.layer_norm(x, (224,), head.layer_norm1.weight, head.layer_norm1.bias)
    x = F.relu(F.linear(x, head.fc1.weight, head.fc1.bias))
    for block in head.mlp_resnet_blocks:
        y = F.layer_norm(x, (32,), block.ffn[0].weight, block.ffn[0].bias)
        x = x + F.relu(F.linear(y, block.ffn[1].weight, block.ffn[1].bias))
    x = F.linear(
        F.layer_norm(x, (32,), head.layer_norm2.weight, head.layer_norm2.bias),
        head.fc2.weight,
        head.fc2.bias,
    )
    torch.testing.assert_close(policy.normalized_actions(observation), x)
    loss, metrics = policy.imitation_loss(
        observation, torch.zeros(3, 2, 7), torch.ones(3, 2, dtype=torch.bool)
    )
    loss.backward()
    assert policy.action_head.model.fc1.weight.grad.abs().max() > 0 and set(metrics) == {
        "l1",
        "mae",
    }
    assert "likelihood" not in policy.can


# ---------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"instruction": ("open", " ", "push")}, UserError, "instruction is ' '"),
        ({"instruction": ("open", "push " * 600, "push")}, UserError, "model reads 2048: shorten"),
        (
            {"images": {"wrist": torch.zeros(3, 32, 32, 3, dtype=torch.uint8)}},
            EmbodimentMismatch,
            "camera agentview",
        ),
        (
            {"images": {"agentview": torch.zeros(3, 16, 32, 3, dtype=torch.uint8)}},
            EmbodimentMismatch,
            "32x32x3.*16, 32, 3",
        ),
        (
            {"images": {"agentview": torch.zeros(3, 32, 32, 3)}},
            EmbodimentMismatch,
            "uint8 32x32x3.*float32",
        ),
        ({"proprio": torch.zeros(3, 5)}, EmbodimentMismatch, "8 proprio dimensions .* has 5"),
    ],
    ids=["empty", "long", "camera", "size", "dtype", "proprio"],
)
def test_bad_observations(folder, change, error, words):
    with pytest.raises(error, match=words):
        observation = dataclasses.replace(
            observe(), **{k: v for k, v in change.items() if k != "images"}
        )
        if "images" in change:  # in place: the tests check the types of a new observation
            observation.images.clear()
            observation.images.update(change["images"])
        load(folder).act(observation)


def test_bad_chunks_and_action_spaces(folder):
    with pytest.raises(EmbodimentMismatch, match="predicts chunks of 2 x 7"):
        load(folder).imitation_loss(
            observe(), torch.zeros(3, 5, 7), torch.ones(3, 5, dtype=torch.bool)
        )
    six = libero_like(action_names=("dx", "dy", "dz", "dr", "dp", "gripper"))
    with pytest.raises(
        EmbodimentMismatch, match="7 action dimensions, embodiment libero_like has 6"
    ):
        OpenVLA.from_pretrained(folder, six, **PLAIN)
    no_gripper = libero_like(action_names=tuple("abcdefg"))
    with pytest.raises(EmbodimentMismatch, match=r"policy\.gripper=none"):
        OpenVLA.from_pretrained(folder, no_gripper, **PLAIN)
    with pytest.raises(EmbodimentMismatch, match="asks for \\['top'\\]"):
        load(folder, cameras=["top"])


def test_a_chunk_length_that_the_checkpoint_does_not_have(tmp_path):
    folder = write_checkpoint(tmp_path, num_actions_chunk=8)
    with pytest.raises(
        ConfigError, match=r"chunk_length is 2, but .* records num_actions_chunk = 8: set policy\."
    ):
        load(folder)


@pytest.mark.parametrize(
    # openvla-oft's constants of LIBERO, ALOHA and Bridge; openvla has no chunks
    ("name", "options", "published"),
    [
        ("libero_spatial_no_noops", {}, 8),
        ("libero_130_no_noops_trajall", {"dialect": "rlinf"}, 8),
        ("aloha1_fold_shirt_30_demos", {}, 25),
        ("bridge_orig", {}, 5),
        ("bridge_orig", {"decoding": "autoregressive"}, 1),
        ("bridge_orig", {"dialect": "rlinf"}, None),
        # SimpleVLA-RL's of RoboTwin, by its platform ALOHA, ALOHA_12, ALOHA_8 or ALOHA_6
        ("place_empty_cup_1k", {}, 25),
        ("place_empty_cup_1k", {}, 6),
        ("a_robot_of_mine", {}, None),
    ],
)
def test_published_folders_act_with_their_own_chunk_length(tmp_path, name, options, published):
    folder = write_checkpoint(tmp_path, chunk_length=None)
    (folder / "dataset_statistics.json").write_text(
        json.dumps({name: STATISTICS["libero_spatial_no_noops"]})
    )
    if published is None:
        load(folder, **options)  # nothing is known about these
        return
    with pytest.raises(
        ConfigError, match=rf"is 2, but .*chunks of .*{published} .*set policy.chunk_length="
    ):
        load(folder, **options)
    load(folder, **options, chunk_length=published)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "chunk_length": 2}))
    load(folder, **options)  # as the message says


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dialect": "simplevla"}, "policy.dialect='simplevla' .* one of official, rlinf"),
        ({"temperature": 0.0}, "temperature=0.0 .* above 0"),
        ({"cameras": list("abcd")}, "policy.cameras=.* has 4 entries: it must have at most 3"),
        ({"decoding": "autoregressive", "attention": "bidirectional"}, "does not go with"),
        ({"decoding": "autoregressive", "noise_correlation": 0.5}, "policy.noise_correlation=0"),
        ({"save_trained_only": True}, "needs policy.checkpoint"),
        ({"chunk_length": 0}, "chunk_length=0 .* 1 or more"),
        ({"lora_rank": -1}, "lora_rank=-1 .* 0 or more"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        OpenVLAConfig(**options)


def test_statistics_are_named_never_guessed(tmp_path):
    folder = write_checkpoint(tmp_path)
    assert load(folder, unnorm_key="libero_spatial").unnorm_key == "libero_spatial_no_noops"
    with pytest.raises(ConfigError, match=r"'bridge' is not among .*: libero_spatial_no_noops"):
        load(folder, unnorm_key="bridge")
    several = {
        "a": STATISTICS["libero_spatial_no_noops"],
        "b": STATISTICS["libero_spatial_no_noops"],
    }
    (folder / "dataset_statistics.json").write_text(json.dumps(several))
    with pytest.raises(
        ConfigError, match=r"empty and does not choose among .*dataset_statistics.json: a, b"
    ):
        load(folder)


def test_the_dialects_differ_in_whose_statistics_count(tmp_path):
    """openvla-oft: the file in place of norm_stats. RLinf: norm_stats, and over them the file."""
    entry = STATISTICS["libero_spatial_no_noops"]
    wide = {**entry, "action": {**entry["action"], "q99": [9.0] * 6 + [1.0]}}
    folder = write_checkpoint(tmp_path, norm_stats={"first": entry, "both": wide})
    (folder / "dataset_statistics.json").write_text(json.dumps({"both": entry, "second": entry}))
    with pytest.raises(
        ConfigError, match=r"'first' is not among .*dataset_statistics.json: both, second\."
    ):
        load(folder, unnorm_key="first")
    for key in ("first", "both", "second"):
        policy = load(folder, unnorm_key=key, dialect="rlinf")
        assert policy.codec.high[0] == 0.9, key
    (folder / "dataset_statistics.json").unlink()
    assert load(folder, unnorm_key="both").codec.high[0] == 9.0
    with pytest.raises(ConfigError, match=r"config.json \(norm_stats\): both, first\."):
        load(folder, unnorm_key="second")
