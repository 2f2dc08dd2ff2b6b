"""The request path: only checked bytes run, whatever they do is a refusal, and nothing of it stays behind."""

from __future__ import annotations

import gc
import sys
import weakref
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from engine.build import BuildManifest
from engine.front.checked import BuildRefusedError
from engine.front.generations import Generation, GenerationRefusedError, Generations
from engine.front.path import PathServices, RequestPath, load_request_path, module_name
from engine.front.staging import load_generation
from engine.front.template import ChatTemplateError, compile_chat_template
from engine.front.testing import front_build

DEMO = resources.files("patchctl.demo.paths")
SOUND = (DEMO / "request_path_1_0_1.py").read_bytes()
FAULTY = (DEMO / "request_path_1_0_0.py").read_bytes()
SERVICES = PathServices(lambda text, add_special: [0] * len(text), lambda messages: str(list(messages)))


def build(tmp_path: Path, source: bytes, name: str = "build") -> tuple[Path, BuildManifest]:
    folder = tmp_path / name
    return folder, front_build(folder, source)


def load(tmp_path: Path, source: bytes, name: str = "build") -> RequestPath:
    return load_request_path(*build(tmp_path, source, name), SERVICES).path


@pytest.mark.parametrize("flip", [0, 100, -1])
def test_an_altered_module_never_runs(tmp_path: Path, flip: int) -> None:
    marker = tmp_path / "ran"
    source = f"open({str(marker)!r}, 'w')\n".encode() + SOUND
    folder, manifest = build(tmp_path, source)
    altered = bytearray(source)
    altered[flip] ^= 1
    (folder / "request_path.py").write_bytes(altered)
    with pytest.raises(BuildRefusedError, match="does not match its sha256"):
        load_request_path(folder, manifest, SERVICES)
    assert not marker.exists()


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("change", ["append", "remove"])
def test_altered_model_files_are_refused(tmp_path: Path, file: str, change: str) -> None:
    folder, manifest = build(tmp_path, SOUND)
    if change == "append":
        with (folder / file).open("ab") as out:
            out.write(b" ")
    else:
        (folder / file).unlink()
    with pytest.raises(BuildRefusedError):
        load_generation(1, folder, manifest.digest)


def test_another_build_in_the_folder_is_refused(tmp_path: Path) -> None:
    folder, _ = build(tmp_path, SOUND)
    with pytest.raises(BuildRefusedError, match="not sha256:00"):
        load_generation(1, folder, "sha256:" + "00" * 32)


@pytest.mark.parametrize(
    "source",
    [
        b"def create(",
        b"raise ValueError('no')",
        b"raise SystemExit(0)",
        b"import a_module_that_is_not_there",
        b"x = 1",
        b"def create(services): return None",
        b"def create(services): raise RuntimeError('no')",
        b"def create(services): exit()",
        b"\xff\xfe",
        b"a\0b",
        SOUND.replace(b"data: ", b"date: "),
        SOUND.replace(b"self._services.encode(text, add_special)", b"text"),
        SOUND.replace(b"def close", b"def shut"),
    ],
)
def test_whatever_a_module_does_is_a_refusal(tmp_path: Path, source: bytes) -> None:
    folder, manifest = build(tmp_path, source)
    with pytest.raises(BuildRefusedError, match="request path"):
        load_request_path(folder, manifest, SERVICES)
    assert module_name(manifest.digest) not in sys.modules


def test_the_module_has_a_name_of_its_own_and_leaves_nothing(tmp_path: Path) -> None:
    folder, manifest = build(tmp_path, SOUND)
    before = sorted(folder.rglob("*"))
    loaded = load_request_path(folder, manifest, SERVICES)
    name = module_name(manifest.digest)
    assert name == f"patchctl_build_{manifest.digest[7:23]}_path"
    assert type(loaded.path).__module__ == name
    assert name in sys.modules
    loaded.close()
    loaded.close()
    assert name not in sys.modules
    assert sorted(folder.rglob("*")) == before


def test_what_a_module_keeps_in_globals_is_freed_when_it_is_closed(tmp_path: Path) -> None:
    folder, manifest = build(tmp_path, SOUND + b"class Kept: pass\nkept = Kept()\n")
    loaded = load_request_path(folder, manifest, SERVICES)
    kept = weakref.ref(sys.modules[module_name(manifest.digest)].kept)
    gc.disable()
    try:
        loaded.close()
        assert kept() is None
    finally:
        gc.enable()


def test_closing_one_of_two_equal_builds_keeps_the_other(tmp_path: Path) -> None:
    folder, manifest = build(tmp_path, SOUND)
    first = load_request_path(folder, manifest, SERVICES)
    second = load_request_path(folder, manifest, SERVICES)
    first.close()
    assert module_name(manifest.digest) in sys.modules
    assert bytes(second.path.open_stream("r").event(b"x")) == b"data: x\n\n"
    second.close()


EVENTS = [b"{}", b"x" * 1500, b"", "héllo 🌍".encode(), b"y" * 20_000, b"[DONE]"]


def test_both_demo_paths_write_the_same_bytes(tmp_path: Path) -> None:
    outputs = []
    for name, source in (("faulty", FAULTY), ("sound", SOUND)):
        path = load(tmp_path, source, name)
        writer = path.open_stream("cmpl-1")
        outputs.append([bytes(writer.event(event)) for event in EVENTS])
        writer.close()
        assert list(path.encode("abc", add_special=True)) == [0, 0, 0]
        assert path.chat_prompt([{"role": "user", "content": "a"}]) == "[{'role': 'user', 'content': 'a'}]"
    assert outputs[0] == outputs[1] == [b"data: " + event + b"\n\n" for event in EVENTS]


def test_only_the_first_demo_path_keeps_its_frames(tmp_path: Path) -> None:
    kept = []
    for name, source in (("faulty", FAULTY), ("sound", SOUND)):
        path = load(tmp_path, source, name)
        gc.collect()
        before = sum(type(item) is memoryview for item in gc.get_objects())
        writer = path.open_stream("r")
        for _ in range(50):
            writer.event(b"{}")
        writer.close()
        kept.append(sum(type(item) is memoryview for item in gc.get_objects()) - before)
    assert kept[0] >= 50
    assert kept[1] <= 1


def generation(tmp_path: Path, number: int, source: bytes = SOUND) -> Generation:
    folder, manifest = build(tmp_path, source + b"# %d\n" % number, f"build{number}")
    return load_generation(number, folder, manifest.digest)


def test_a_released_generation_is_really_freed_with_its_last_response(tmp_path: Path) -> None:
    freed: list[None] = []
    generations = Generations(lambda: freed.append(None))
    generations.add(generation(tmp_path, 1, FAULTY))
    generations.exchange(1)
    old = generations.enter()
    assert old is not None
    name = module_name(old.build)
    witnesses: list[weakref.ref[Any]] = [
        weakref.ref(old),
        weakref.ref(old.path),
        weakref.ref(sys.modules[name]),
        weakref.ref(type(old.path)),
    ]
    generations.add(generation(tmp_path, 2))
    assert generations.exchange(2)
    assert generations.release(1) == 1
    assert bytes(old.path.open_stream("r").event(b"x")) == b"data: x\n\n"
    assert not freed
    generations.leave(old)
    del old
    gc.collect()
    assert len(freed) == 1
    assert [witness() for witness in witnesses] == [None] * 4
    assert [one.number for one in generations] == [2]


def test_generations_follow_the_engine(tmp_path: Path) -> None:
    generations = Generations(lambda: None)
    assert generations.enter() is None
    first, second, third = (generation(tmp_path, number) for number in (1, 2, 3))
    generations.add(first)
    assert generations.enter() is None
    assert generations.exchange(1)
    assert generations.active is first
    generations.add(second)
    assert generations.active is first
    with pytest.raises(GenerationRefusedError, match="serves") as caught:
        generations.release(1)
    assert caught.value.code == "generation_active"
    with pytest.raises(GenerationRefusedError) as caught:
        generations.check_room(3, third.build)
    assert caught.value.code == "generation_limit"
    with pytest.raises(GenerationRefusedError) as caught:
        generations.check_room(2, "sha256:other")
    assert caught.value.code == "generation_exists"
    assert not generations.check_room(2, second.build)
    assert generations.exchange(2)
    assert generations.exchange(1)
    assert generations.active is first
    assert generations.release(2) == 0
    with pytest.raises(GenerationRefusedError) as caught:
        generations.release(2)
    assert caught.value.code == "generation_unknown"
    assert generations.check_room(3, third.build)


def test_an_exchange_to_a_generation_not_held_serves_nothing_until_it_is_staged(tmp_path: Path) -> None:
    generations = Generations(lambda: None)
    first, second, third = (generation(tmp_path, number) for number in (1, 2, 3))
    generations.add(first)
    generations.exchange(1)
    assert not generations.exchange(3)
    assert generations.enter() is None
    generations.add(second)
    assert generations.enter() is None
    generations.release(2)
    generations.add(third)
    assert generations.active is third


def test_a_lost_engine_takes_what_serves_with_it_until_the_next_one_speaks(tmp_path: Path) -> None:
    generations = Generations(lambda: None)
    first, second = (generation(tmp_path, number) for number in (1, 2))
    generations.add(first)
    generations.add(second)
    generations.exchange(2)
    entered = generations.enter()
    generations.engine_lost()
    assert (generations.active, generations.enter(), generations.engine_generation) == (None, None, None)
    assert [one.number for one in generations] == [1, 2]
    assert entered is second
    generations.leave(second)
    assert generations.exchange(1)
    assert generations.enter() is first
    assert generations.release(2) == 0


def test_a_rollback_keeps_a_generation_that_was_about_to_go(tmp_path: Path) -> None:
    generations = Generations(lambda: None)
    first, second = (generation(tmp_path, number) for number in (1, 2))
    generations.add(first)
    generations.exchange(1)
    generations.enter()
    generations.add(second)
    generations.exchange(2)
    generations.release(1)
    generations.exchange(1)
    generations.leave(first)
    assert [one.number for one in generations] == [1, 2]
    assert generations.enter() is first
    assert bytes(first.path.open_stream("r").event(b"x")) == b"data: x\n\n"


def test_an_equal_tokenizer_is_not_loaded_twice(tmp_path: Path) -> None:
    first = generation(tmp_path, 1)
    folder, manifest = build(tmp_path, SOUND, "again")
    second = load_generation(2, folder, manifest.digest, [first.assets])
    assert second.assets.tokenizer is first.assets.tokenizer
    assert load_generation(3, folder, manifest.digest).assets.tokenizer is not first.assets.tokenizer


def test_templates_are_sandboxed_and_their_refusals_are_explained() -> None:
    render = compile_chat_template(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", {"bos_token": "<"}
    )
    assert render([{"role": "user", "content": "{{ 1 }}"}]) == "<{{ 1 }}"
    refusals = ("{{ raise_exception('no') }}", "{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}")
    for source in refusals:
        with pytest.raises(ChatTemplateError):
            compile_chat_template(source, {})([{"role": "user", "content": ""}])
    with pytest.raises(ChatTemplateError, match="does not compile"):
        compile_chat_template("{% for %}", {})
    with pytest.raises(ChatTemplateError, match="no chat template"):
        compile_chat_template(None, {})([])
