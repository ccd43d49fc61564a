#!/bin/sh
# Install a device from a wheel, on Raspberry Pi OS, Debian or Ubuntu with systemd, as root:
#   install-device.sh WHEEL SHA256 LOCK ENROLLMENT IMAGES        a closed fleet: the folder that `aggregator enroll` wrote
#   install-device.sh WHEEL SHA256 LOCK HOST[:PORT] IMAGES       an open fleet: its broker
# WHEEL is protofleet-0.1.0-py3-none-any.whl, SHA256 its checksum, and LOCK the file device.lock with versions and checksums of all
# other packages: docs/operations/install.md has the commands that make them. IMAGES is a folder with one folder of images per class.
# Run it again with a newer WHEEL and its LOCK to upgrade; state and settings stay.
set -eu
if [ $# -ne 5 ]; then
  sed -n '2,7s/^# //p' "$0" >&2
  exit 2
fi
wheel=$1 sha256=$2 lock=$3 fleet=$4 images=$5
here=$(cd "$(dirname "$0")" && pwd)
settings=/etc/protofleet
[ -f "$wheel" ] || { echo "no wheel at $wheel" >&2; exit 2; }
[ "$(sha256sum < "$wheel")" = "$sha256  -" ] || { echo "the sha256 of $wheel is not $sha256: copy the wheel again" >&2; exit 1; }
[ -f "$lock" ] || { echo "no lock file at $lock" >&2; exit 2; }
[ -d "$images" ] || { echo "no folder of images at $images" >&2; exit 2; }
images=$(cd "$images" && pwd)
case "$fleet$images" in
  *[\"\\[:cntrl:]]*) echo "expected a path without \", \\ and control characters, got $fleet and $images: rename the folder" >&2; exit 2 ;;
esac

echo "==> packages"
apt-get update -q
apt-get install -y -q --no-install-recommends python3 python3-venv
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is required: Raspberry Pi OS 12 (bookworm) or later" >&2; exit 1; }

echo "==> program"
id protofleet >/dev/null 2>&1 || useradd --system --home-dir /var/lib/protofleet --shell /usr/sbin/nologin protofleet
[ -x /opt/protofleet/bin/python ] || python3 -m venv /opt/protofleet
# Wheels only: what builds a source distribution is not in the lock file.
/opt/protofleet/bin/pip install --quiet --require-hashes --only-binary :all: --requirement "$lock"
/opt/protofleet/bin/pip install --quiet --no-deps --no-index --force-reinstall "$wheel"
/opt/protofleet/bin/pip check
/opt/protofleet/bin/edge-client --version

runuser -u protofleet -- test -r "$images" || echo "warning: the user protofleet cannot read $images" >&2

echo "==> settings"
install -d -m 0755 "$settings"
if [ ! -f "$settings/edge-client.toml" ]; then
  if [ -d "$fleet" ]; then
    cp -R "$fleet" "$settings/enrollment"
    chown -R protofleet: "$settings/enrollment"
    chmod -R go= "$settings/enrollment"
    printf 'enrollment = "%s/enrollment"\ndata = "%s"\n' "$settings" "$images" > "$settings/edge-client.toml"
  else
    printf 'broker = "%s"\ndata = "%s"\n' "$fleet" "$images" > "$settings/edge-client.toml"
  fi
fi

echo "==> service"
install -m 0644 "$here/edge-client.service" /etc/systemd/system/edge-client.service
systemctl daemon-reload
systemctl enable edge-client
systemctl restart edge-client
echo "installed: journalctl -u edge-client -f shows what it does; settings are in $settings/edge-client.toml"
