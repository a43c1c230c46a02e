"""docker/: what can be checked of the images without building them."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import yaml
from making import write_program
from needs import SSHD, needs_sshd, tracked_files

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE_FILES = [DOCKER / "compose.yaml", DOCKER / "compose.gpu.yaml"]
BIN = Path(sys.executable).parent
NAME = "imagenet-horovod-ddp"
# What lies at the top of the checkout and is meant to stay out of the images.
LEFT_OUT = {".ci", ".github", ".gitignore"}
PACKAGES_DEPEND_ON = {
    "pyproject.toml",
    "requirements.lock",
    "docker/pip_environment.sh",
    "docker/install_packages.sh",
}


# ---- linters


LINTERS = {
    "hadolint": [str(BIN / "hadolint"), str(DOCKER / "Dockerfile")],
    "check-jsonschema": [
        *(str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec"),
        *map(str, COMPOSE_FILES),
    ],
    **{script.name: ["sh", "-n", str(script)] for script in DOCKER.glob("*.sh")},
}


@pytest.mark.parametrize("name", LINTERS)
def test_linters_have_nothing_to_say(name: str) -> None:
    subprocess.run(LINTERS[name], check=True)


# ---- the Dockerfile and what it names


def test_every_file_that_the_build_takes_is_there_and_let_in() -> None:
    one_line = DOCKERFILE.replace("\\\n", " ")
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", one_line, re.MULTILINE)
    taken = {name for line in copied for name in line.split()} - {"."}
    assert {"requirements.lock", "docker/sshd_config"} <= taken
    assert [name for name in taken if not (ROOT / name).exists()] == []
    assert {name.split("/")[0] for name in taken} <= let_in_by_dockerignore()


def test_the_layers_of_packages_depend_on_no_sources() -> None:
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S))
    assert {"cpu", "cuda", "test", "cpu-packages", "cuda-packages"} <= set(stages)
    for name in ("system", "cpu-packages", "cuda-packages"):
        copied = " ".join(re.findall(r"^COPY (.*)", stages[name], re.MULTILINE))
        assert set(re.findall(r"[\w/]+\.\w+", copied)) <= PACKAGES_DEPEND_ON, name
    # A layer that Buildah or Podman has kept would not notice a change of what is mounted.
    assert "type=bind" not in DOCKERFILE
    users = [re.findall(r"^USER .*", stages[name], re.MULTILINE) for name in ("cpu", "cuda")]
    assert users == [["USER 1000"]] * 2


def test_the_image_for_gpus_has_what_is_needed_at_run_time() -> None:
    """A compiler and Python.h for --compile, libibverbs for NCCL, and which driver it takes."""
    stage = DOCKERFILE.partition(" AS cuda\n")[2]
    assert {"g++", "python3-dev", "libibverbs1", "ibverbs-providers"} <= set(stage.split())
    found = re.findall(
        r"^nvidia-cuda-runtime==(\d+)\.", (ROOT / "requirements.lock").read_text(), re.M
    )
    assert f"NVIDIA_REQUIRE_CUDA=cuda>={found[-1]}.0\n" in stage


def said(pattern: str, *names: str) -> list[str]:
    """What the files of docker/ say, one after the other."""
    texts = [(DOCKER / name).read_text() for name in names]
    return [found for text in texts for found in re.findall(pattern, text, re.MULTILINE)]


def test_all_files_mean_the_same_environment_and_user() -> None:
    """The image's variables, those that sshd gives a login, and the scripts that install."""
    variables = dict(said(r"\b(OPAL_PREFIX|PATH)=(\S+)", "Dockerfile"))
    (line,) = said(r"^SetEnv (.*)", "sshd_config")
    login = dict(word.split("=", 1) for word in shlex.split(line))
    venv = variables["OPAL_PREFIX"]
    assert login["OPAL_PREFIX"] == venv
    assert {path["PATH"].split(":")[0] for path in (variables, login)} == {f"{venv}/bin"}
    for name in ("install_packages.sh", "make_horovod.sh", "apptainer.def"):
        assert set(said(r"/opt/\w+", name)) == {venv}, name
    (home,) = said(r"--mode 700 (\S+)/.ssh", "Dockerfile")
    for name in ("ssh_config", "sshd_config", "believed_host_keys.sh", "compose.yaml"):
        assert set(said(r"/home/\w+", name)) == {home}, name


def test_ssh_and_sshd_mean_the_same_port_and_keys() -> None:
    keys = set(said(r"IdentityFile (\S+)", "ssh_config"))
    assert len(keys) == 2
    assert keys == set(said(r"HostKey (\S+)", "sshd_config"))
    assert keys == set(said(r"/home\S+id_\w+", "believed_host_keys.sh"))
    assert said(r"Port (\d+)", "ssh_config") == said(r"^Port (\d+)", "sshd_config")


@needs_sshd
def test_sshd_understands_its_configuration() -> None:
    # Run by root, it would want a folder of the system's; in the image it is not run by root.
    nobody, is_root = 65534, os.geteuid() == 0
    as_user = ["setpriv", f"--reuid={nobody}", f"--regid={nobody}", "--clear-groups"]
    with tempfile.TemporaryDirectory() as folder:
        key, config = Path(folder, "id_ed25519"), Path(folder, "sshd_config")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        text = (DOCKER / "sshd_config").read_text()
        config.write_text(text.replace("/home/trainer/.ssh", folder))
        for path in (folder, key, config) if is_root else ():
            os.chown(path, nobody, nobody)
        command = [*(as_user if is_root else ()), str(SSHD), "-T", "-f", str(config)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "port 2222" in done.stdout.splitlines(), done.stderr


# ---- .dockerignore


def let_in_by_dockerignore() -> set[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    assert patterns[0] == "*", "all is left out, but for what is named"
    return {pattern[1:] for pattern in patterns if pattern.startswith("!")}


def test_dockerignore_lets_in_what_is_there_and_no_more() -> None:
    let_in = let_in_by_dockerignore()
    assert [name for name in let_in if not (ROOT / name).exists()] == []
    assert not let_in & {"runs", ".venv", ".git", ".", *LEFT_OUT}
    top = {name.split("/")[0] for name in tracked_files()}
    assert top <= let_in | LEFT_OUT, "new in the checkout: let it in, or leave it out here too"


# ---- compose.yaml


def test_compose_starts_the_two_nodes_of_the_readme() -> None:
    text = COMPOSE_FILES[0].read_text()
    services = yaml.safe_load(text)["services"]
    assert set(services) == {"keys", "node0", "node1"}
    for name in ("node0", "node1"):
        node = {
            "hostname": name,
            "cap_drop": ["ALL"],  # sshd belongs to its user
            "command": ["/usr/sbin/sshd", "-D", "-e"],
            "depends_on": {"keys": {"condition": "service_completed_successfully"}},
        }
        assert services[name].items() >= node.items()
        volumes = services[name]["volumes"]
        assert {"keys:/home/trainer/.ssh:ro", "runs:/workspace/runs"} <= set(volumes)
    # The README's line, with two workers a node in place of eight.
    line = "horovodrun -np {} -H node0:{},node1:{} python horovod_train/train.py"
    assert line.format(16, 8, 8) in (ROOT / "README.md").read_text()
    assert line.format(4, 2, 2) in text
    assert line.format(4, 2, 2) in (ROOT / "docs" / "containers.md").read_text()


# ---- build.sh


def build(folder: Path, *targets: str, works: str = "docker", **settings: str) -> tuple[str, str]:
    """What docker/build.sh has a builder do that `works`, and what it says where it refuses."""
    for builder in ("docker", "podman", "buildah"):
        says = f'[ "$1" = version ] || [ "$2" = ls ] || echo {builder} "$@"'
        write_program(folder / builder, f"{says}; exit {int(builder not in works)}")
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SOURCE_DATE_EPOCH": "7", **settings}
    done = subprocess.run(
        ["sh", str(DOCKER / "build.sh"), *targets], env=environment, capture_output=True, text=True
    )
    assert (done.returncode == 0) == (not done.stderr)
    return "\n".join(re.findall(r"^(?!images: ).+", done.stdout, re.MULTILINE)), done.stderr


def test_the_images_that_are_built_are_those_of_compose(tmp_path: Path) -> None:
    """Their tags tell version, target and torch, too."""
    built = build(tmp_path)[0].splitlines()
    project = (ROOT / "pyproject.toml").read_text()
    for file, target, command in zip(COMPOSE_FILES, ("cpu", "cuda"), built, strict=True):
        match = re.search(rf"--tag {NAME}:([\d.]+)-{target}-torch([\d.]+) ", command)
        assert match and f'version = "{match[1]}"' in project
        assert f'"torch=={match[2]}; python_version >=' in project
        assert f"--tag {NAME}:{target} " in command and "SOURCE_DATE_EPOCH=7" in command
        services = yaml.safe_load(file.read_text())["services"].values()
        assert {service["image"] for service in services} == {f"${{IMAGE:-{NAME}:{target}}}"}


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_secrets_are_passed_only_when_given(builder: str, tmp_path: Path) -> None:
    plain, _ = build(tmp_path, "cpu", works=builder)
    assert plain.startswith(builder) and ("--timestamp 7" in plain) == (builder != "docker")
    assert "--secret" not in plain and "BASE=" not in plain
    settings = {"PIP_CONFIG": "/a/pip.conf", "CA_BUNDLE": "/a/ca.pem", "BASE": "mine:1"}
    command, _ = build(tmp_path, "cpu", works=builder, IMAGE_NAME="registry/name", **settings)
    expected = {"id=pip_config,src=/a/pip.conf", "id=ca_bundle,src=/a/ca.pem", "BASE=mine:1"}
    assert {*expected, "registry/name:cpu"} <= set(command.split())
    mounts = re.findall(r"type=secret,id=(\w+)", DOCKERFILE)
    assert Counter(mounts) == {"pip_config": 5, "ca_bundle": 5}


def test_what_cannot_be_built_is_refused(tmp_path: Path) -> None:
    assert "there is no target 'gpu': choose from cpu, cuda, test" in build(tmp_path, "gpu")[1]
    assert "images: no builder works here" in build(tmp_path, works="none")[1]
    assert (
        "images: docker does not work here" in build(tmp_path, works="podman", BUILDER="docker")[1]
    )
