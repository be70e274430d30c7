from pathlib import Path

Path("my_package").mkdir()
Path("my_package/__init__.py").touch()
Path("my_package/engine.py").write_text(
    "from fastserial.engines.threads import ThreadsEngine as MyEngine\n"
)
