"""The tarball: packed, unpacked into an empty folder, and looked at from there.

Checked is what it promises: its size, that each of its programs and libraries finds everything but
the C library inside the archive, that the C library may be as old as 2.34, that nothing of NVIDIA's
lies in it, and that an unpacked sample runs with the unpacked programs on the simulated GPU.
"""
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

MOST_BYTES = 60 << 20
NEWEST_GLIBC = (2, 34)
OF_GLIBC = re.compile(r"^(lib(c|m|dl|pthread|rt|util|resolv)\.so\.|ld-linux)")
OF_NVIDIA = re.compile(r"lib(cuda(rt)?|cu[a-z]+|nv[a-zA-Z-]+)\.so")

# A sample is a program as its users build theirs, with the compiler's defaults.
OF_A_SAMPLE = {"libcuda.so.1", "libstdc++.so.6", "libgcc_s.so.1"}


def main(cpack, config):
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        (scratch / "packed").mkdir()
        packed = subprocess.run([cpack, "--config", config, "-D",
                                 f"CPACK_OUTPUT_FILE_PREFIX={scratch}/packed"], cwd=scratch / "packed",
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert packed.returncode == 0, packed.stdout
        archive, = (scratch / "packed").glob("*.tar.gz")
        assert archive.stat().st_size < MOST_BYTES, archive.stat().st_size
        with tarfile.open(archive) as tar:
            tar.extractall(scratch)
        root, = (path for path in scratch.iterdir() if path.name != "packed")
        binaries = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()
                    and path.open("rb").read(4) == b"\x7fELF"]
        assert len(binaries) > 40, binaries
        for binary in binaries:
            check_needs(binary, root)
        foreign = [path for path in root.rglob("*") if OF_NVIDIA.match(path.name)
                   and path.parent not in (root / "lib/penstock", root / "lib/penstock/simgpu")]
        assert not foreign, foreign
        for name in ("README.md", "LICENSE"):
            assert (root / name).stat().st_size > 0
        private = {re.sub(r"\.so.*", "", path.name)
                   for path in (root / "lib/penstock/private").iterdir()}
        licensed = {path.name for path in (root / "licenses").iterdir()}
        assert private <= licensed, (private, licensed)
        sample = subprocess.run(
            [root / "bin/penstock", "run", "--sim", "--", root / "samples/static/vector_add"],
            stdout=subprocess.PIPE, text=True, timeout=60)
        assert sample.returncode == 0 and sample.stdout.endswith(", ok\n"), sample
        print(f"{archive.name}: {archive.stat().st_size / (1 << 20):.1f} MiB, "
              f"{len(binaries)} programs and libraries")


def check_needs(binary, root):
    dynamic = subprocess.run(["readelf", "-dW", "--version-info", binary], check=True,
                             stdout=subprocess.PIPE, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    runpath = re.findall(r"\(RUNPATH\).*\[(.*)\]", dynamic)
    folders = [folder.replace("$ORIGIN", str(binary.parent)) for path in runpath
               for folder in path.split(":")]
    for name in needed:
        if OF_GLIBC.match(name) or (root / "samples" in binary.parents and name in OF_A_SAMPLE):
            continue
        found = [folder for folder in folders if (pathlib.Path(folder) / name).exists()]
        beside = (binary.parent / name).exists() and binary.parent.name == "private"
        assert found or beside, f"{binary.relative_to(root)} needs {name}, which is not packed."
    for folder in folders:
        assert "$ORIGIN" in "".join(runpath), f"{binary} looks into {folder}"
    versions = {tuple(map(int, version.split(".")))
                for version in re.findall(r"\bGLIBC_([0-9]+\.[0-9.]+)", dynamic)}
    newer = {version for version in versions if version > NEWEST_GLIBC}
    assert not newer, f"{binary.relative_to(root)} needs glibc {newer}."


main(*sys.argv[1:])
