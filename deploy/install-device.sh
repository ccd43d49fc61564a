#!/bin/sh
# Install a device from a wheel, on Raspberry Pi OS, Debian or Ubuntu with systemd, as root:
#   install-device.sh SHA256 ENROLLMENT IMAGES        a closed fleet: the folder that `aggregator enroll` wrote
#   install-device.sh SHA256 HOST[:PORT] IMAGES       an open fleet: its broker
# Beside this script are the wheel, device.lock with versions and checksums of all other packages, edge-client.service, and SHA256SUMS
# with the checksums of the three. SHA256 is that of SHA256SUMS: docs/operations/install.md has the commands that make them. IMAGES is a
# folder with one folder of images per class. Run it again with newer files to upgrade; state and settings stay.
set -eu

fail() {
  code=$1
  shift
  echo "$*" >&2
  exit "$code"
}

# Copy a file to the folder $own and verify it there: where it came from, other users may replace it at any time.
take() {
  [ -f "$here/$1" ] || fail 2 "no file $1 beside the script"
  cp "$here/$1" "$own/$1"
  if [ "$1" = SHA256SUMS ]; then
    expected=$sha256
  else
    expected=$(awk -v name="$1" '$2 == name || $2 == "*" name { print $1 }' "$own/SHA256SUMS")
  fi
  [ "$(sha256sum < "$own/$1")" = "$expected  -" ] || fail 1 "the sha256 of $1 is not ${expected:-in SHA256SUMS}: copy the files again"
}

# The whole script is read before it begins.
main() {
  if [ $# -ne 3 ]; then
    sed -n '2,7s/^# //p' "$0" >&2
    exit 2
  fi
  sha256=$1 fleet=$2 images=$3
  here=$(cd "$(dirname "$0")" && pwd)
  settings=/etc/protofleet
  [ -d "$images" ] || fail 2 "no folder of images at $images"
  images=$(cd "$images" && pwd)
  case "$fleet$images" in
    *[\"\\[:cntrl:]]*) fail 2 "expected a path without \", \\ and control characters, got $fleet and $images: rename the folder" ;;
  esac

  own=$(mktemp -d)
  trap 'rm -rf "$own"' EXIT
  take SHA256SUMS
  wheel=$(awk '{ sub(/^[*]/, "", $2); print $2 }' "$own/SHA256SUMS" | grep -E '^protofleet-[A-Za-z0-9.]+-py3-none-any\.whl$') || true
  [ "$(echo "$wheel" | wc -w)" = 1 ] || fail 1 "expected one wheel of protofleet in SHA256SUMS"
  take "$wheel"
  take device.lock
  take edge-client.service
  # Versions and checksums only: an option could name another package index, which pip would then ask. And printable ASCII only: for pip,
  # a form feed and other characters begin a new line, too.
  name='[A-Za-z0-9][][A-Za-z0-9,._-]*==[A-Za-z0-9.+!_-]+' marker="( ; [][A-Za-z0-9_.,'\"<>=! ()]+)?" hash='--hash=sha256:[0-9a-f]{64}'
  if other=$(LC_ALL=C grep -a -m 1 -n -vE "^( *| *#[ -~]*|$name$marker( $hash)*( \\\\)?| *$hash( \\\\)?)\$" "$own/device.lock"); then
    fail 1 "expected name==version and --hash=sha256:... in device.lock, got line $other"
  fi

  echo "==> packages"
  apt-get update -q
  apt-get install -y -q --no-install-recommends python3 python3-venv
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail 1 "Python 3.11 or newer is required: Raspberry Pi OS 12 (bookworm) or later"

  echo "==> program"
  id edge-client >/dev/null 2>&1 || useradd --system --home-dir /var/lib/protofleet/edge-client --shell /usr/sbin/nologin edge-client
  [ -x /opt/protofleet/bin/python ] || python3 -m venv /opt/protofleet
  # Wheels only: what builds a source distribution is not in the lock file.
  /opt/protofleet/bin/pip install --quiet --require-hashes --only-binary :all: --requirement "$own/device.lock"
  /opt/protofleet/bin/pip install --quiet --no-deps --no-index --force-reinstall "$own/$wheel"
  /opt/protofleet/bin/pip check
  /opt/protofleet/bin/edge-client --version

  runuser -u edge-client -- test -r "$images" || echo "warning: the user edge-client cannot read $images" >&2

  echo "==> settings"
  install -d -m 0755 "$settings"
  if [ ! -f "$settings/edge-client.toml" ]; then
    if [ -d "$fleet" ]; then
      cp -R "$fleet" "$settings/enrollment"
      printf 'enrollment = "%s/enrollment"\ndata = "%s"\n' "$settings" "$images" > "$settings/edge-client.toml"
    else
      printf 'broker = "%s"\ndata = "%s"\n' "$fleet" "$images" > "$settings/edge-client.toml"
    fi
  fi
  if [ -d "$settings/enrollment" ]; then
    chown -R edge-client: "$settings/enrollment"
    chmod -R go= "$settings/enrollment"
  fi

  echo "==> service"
  install -m 0644 "$own/edge-client.service" /etc/systemd/system/edge-client.service
  systemctl daemon-reload
  systemctl enable edge-client
  systemctl restart edge-client
  echo "installed: journalctl -u edge-client -f shows what it does; settings are in $settings/edge-client.toml"
}

main "$@"
