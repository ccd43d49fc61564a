import subprocess
import sys

import protofleet

HEAVY = ("torch", "timm", "onnxscript", "sklearn")


def loaded_by(code: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after some code."""
    program = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_else() -> None:
    """It is lighter than the device program: only parts of the standard library, and not even numpy."""
    roots = {name.partition(".")[0] for name in loaded_by("import protofleet")}
    assert roots - sys.stdlib_module_names == {"protofleet"}


def test_no_public_name_loads_torch() -> None:
    """All names at once: torch is loaded by what trains an adapter or exports a graph, when it runs."""
    loaded = loaded_by("from protofleet import *")
    assert "numpy" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_public_names_are_listed_once() -> None:
    assert set(protofleet.__all__) == set(protofleet._HOMES)
    assert set(protofleet.__all__) <= set(dir(protofleet))
    assert not hasattr(protofleet, "no_such_name")


def test_missing_extra_is_named() -> None:
    """A name that needs a package of an extra says what to install."""
    program = (
        "import protofleet\n"
        "protofleet._HOMES['Head'] = 'no_such_package.head'\n"
        "try:\n    protofleet.Head\n"
        "except protofleet.ProtofleetError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'protofleet-0.1.0-py3-none-any.whl[aggregator,cpu]'" in done.stdout
