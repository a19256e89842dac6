# Shared by quickstart and test: messages, system packages, the virtual environment. Sourced, not run.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
begun=$SECONDS
unset PYTHONDONTWRITEBYTECODE # or each program that is started compiles all that it imports
log=$(mktemp) # of the command that runs now
trap 'rm -f "$log"' EXIT

say() { printf '\n[%4d s] %s\n' $((SECONDS - begun)) "$*"; }

# fail CAUSE REMEDY: end with both on stderr.
fail() {
    printf '\n%s: %s\n  try: %s\n' "$(basename "$0")" "$1" "$2" >&2
    exit 1
}

# as_root COMMAND...: directly as root, else through sudo with what package tools need to reach their mirror.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo --preserve-env=http_proxy,https_proxy,no_proxy,HTTP_PROXY,HTTPS_PROXY,NO_PROXY,DEBIAN_FRONTEND "$@"
    fi
}

check_host() {
    if [ "$(uname -sm)" != "Linux x86_64" ]; then
        fail "this is $(uname -sm); a node needs Linux on x86-64" "use such a machine"
    fi
    # shellcheck source=/dev/null
    . /etc/os-release
    case "$ID:${VERSION_ID:-}" in
        debian:12 | debian:13 | ubuntu:24.04) ;;
        *) fail "this is ${PRETTY_NAME:-$ID}; known here are Debian 12, Debian 13 and Ubuntu 24.04" \
            "use one of them, or install by hand as docs/guides/operations.md lists" ;;
    esac
    suite=$VERSION_CODENAME
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || fail "this user is not root and there is no sudo" "run it as root"
        sudo -n true 2>/dev/null || sudo -v || fail "sudo refused" "run it as root, or as a user who may use sudo"
    fi
}

# need_space DIRECTORY MIB WHAT [REMEDY]: fail now rather than half-way when a filesystem has not that much left.
need_space() {
    local place=$1 free remedy="free some, or name another place: AENV_HOME for a node's data, another checkout for .venv"
    while [ ! -d "$place" ]; do place=$(dirname "$place"); done
    free=$(df --output=avail -BM "$place" | tail -n 1 | tr -dc 0-9 || true)
    [ "$free" -ge "$2" ] || fail "$1 has $free MiB left, and $3 takes about $2 MiB" \
        "${4:-$remedy}"
}

# What the host must have beside QEMU.
system_packages=(busybox-static ca-certificates cpio e2fsprogs iproute2 mmdebstrap nftables python3
    python3-venv util-linux xz-utils zstd)
# What tests compare with: images are unpacked and copied by other programs as well.
# shellcheck disable=SC2034 # used where this file is sourced
test_packages=(docker-registry fish iptables qemu-utils shellcheck skopeo systemd tmux umoci zsh)

missing_packages() {
    local name
    for name in "$@"; do
        [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$name" 2>/dev/null)" = "ii " ] || printf '%s\n' "$name"
    done
}

# qemu_good: is there a QEMU of 8.2 or newer? Older ones corrupt flags under software emulation.
qemu_good() {
    local version
    version=$(qemu-system-x86_64 --version 2>/dev/null | sed -n 's/^QEMU emulator version \([0-9.]*\).*/\1/p')
    [ -n "$version" ] && dpkg --compare-versions "$version" ge 8.2
}

# quietly COMMAND...: what it says only if it fails, the end of it.
quietly() {
    local status=0
    "$@" >"$log" 2>&1 || status=$?
    [ $status = 0 ] || tail -n 20 "$log" >&2
    return $status
}

apt_remedy="see that 'apt-get update' works here; mirrors are named in /etc/apt/sources.list*, a proxy in /etc/apt/apt.conf.d"
apt_wait_s=600

# apt_get ARGUMENT...: waits while another package tool works, and completes what a killed one left.
apt_get() {
    local waits=$((SECONDS + apt_wait_s)) waiting='' mended=''
    until as_root env LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -o Dpkg::Use-Pty=0 "$@" >"$log" 2>&1; do
        if grep -q "^E: Could not get lock" "$log"; then
            [ "$waiting" ] || say "Waiting for another package tool: $(grep -m 1 "^E: Could not get lock" "$log")"
            waiting=1
            [ $SECONDS -lt $waits ] || apt_failed "another package tool has worked for $apt_wait_s s" \
                "run it again when that one is done; its process is named above"
            sleep 2
        elif grep -q "dpkg was interrupted" "$log" && [ -z "$mended" ]; then
            say "Completing an installation that was interrupted: dpkg --configure -a"
            mended=1
            as_root env DEBIAN_FRONTEND=noninteractive dpkg --configure -a >"$log" 2>&1 || true
        elif grep -q "No space left on device\|enough free space" "$log"; then
            apt_failed "there is no space for system packages" "free some in / (apt-get clean helps)"
        else
            apt_failed "apt-get $1 failed" "$apt_remedy"
        fi
    done
    # An update that reached nothing still counts as one, with warnings: they explain what fails next.
    [ "$1" != update ] || apt_warnings=$(grep "^W: Failed to fetch" "$log" || true)
}

apt_warnings=

# apt_failed CAUSE REMEDY
apt_failed() {
    { sed -n 1,3p <<<"$apt_warnings"; tail -n 6 "$log"; } >&2
    fail "${apt_warnings:+apt could not reach its mirror, and }$1 (what apt said is above)" "$2"
}

lists_fresh=

# refresh_lists: apt-get update, once a run.
refresh_lists() {
    [ -z "$lists_fresh" ] || return 0
    apt_get update
    lists_fresh=1
}

# archive SUITE: the address from which the host's apt has it, fetched yet or not; nothing if it has not.
archive() {
    apt-get indextargets --no-release-info --format "\$(RELEASE) \$(SITE)" |
        awk -v suite="$1" '$1 == suite && !found++ { print $2 }'
}

# backports: on Debian 12, QEMU comes from bookworm-backports, through the mirror that apt already uses.
add_backports() {
    local own=/etc/apt/sources.list.d/aenv-backports.sources mirror wanted
    if [ ! -e $own ] && [ "$(archive bookworm-backports)" ]; then return 0; fi
    mirror=$(archive bookworm)
    [ -n "$mirror" ] || fail "apt has no source for bookworm, so the mirror for backports is not known" \
        "add a Debian mirror to /etc/apt/sources.list and run it again"
    wanted=$(printf '%s\n' "Types: deb" "URIs: $mirror" "Suites: bookworm-backports" "Components: main" \
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg")
    [ "$(cat $own 2>/dev/null)" != "$wanted" ] || return 0 # else the mirror was another one, perhaps mended since
    say "Adding bookworm-backports from $mirror (for QEMU)"
    as_root tee $own <<<"$wanted" >/dev/null
}

# install_packages [NAME...]: the system packages and these, only what is missing.
install_packages() {
    local wanted qemu=()
    mapfile -t wanted < <(missing_packages "${system_packages[@]}" "$@")
    qemu_good || qemu=(qemu-system-x86)
    [ $((${#wanted[@]} + ${#qemu[@]})) -gt 0 ] || return 0
    if [ ${#qemu[@]} -gt 0 ] && [ "$suite" = bookworm ]; then
        add_backports
        qemu=(-t bookworm-backports qemu-system-x86)
    fi
    say "Installing system packages: ${wanted[*]} ${qemu[*]: -1}"
    need_space /usr 700 "what is to be installed"
    refresh_lists
    [ ${#wanted[@]} = 0 ] || apt_get install --yes --no-install-recommends "${wanted[@]}"
    [ ${#qemu[@]} = 0 ] || apt_get install --yes --no-install-recommends "${qemu[@]}"
    qemu_good || fail "the installed QEMU is older than 8.2, which corrupts guests under software emulation" \
        "install a newer qemu-system-x86 from your mirror's backports"
}

# make_environment LOCK...: .venv with the locked packages and the project; nothing when it is up to date.
make_environment() {
    local python=${AENV_PYTHON:-/usr/bin/python3} stamp="$root/.venv/.stamp" wanted
    wanted=$(cd "$root" && { "$python" --version; echo "$root"; sha256sum pyproject.toml "$@"; } | sha256sum)
    [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ] || return 0
    [ -w "$root" ] || fail "$root is not writable for $(id -un), and .venv goes there" "make a checkout of your own"
    need_space "$root" 500 "the virtual environment"
    say "Making the virtual environment .venv"
    quietly fill_environment "$python" "$@" ||
        fail "the Python packages could not be installed (the last lines are above)" \
            "see that pip reaches its index: a proxy and certificates go into pip's configuration (pip config debug)"
    echo "$wanted" >"$stamp"
}

fill_environment() {
    local python=$1 scratch="$root/.venv/tmp" # there, a killed run's leftovers go with the next one
    local pip=(env TMPDIR="$scratch" "$root/.venv/bin/pip" --quiet --disable-pip-version-check)
    shift
    "$python" -m venv --clear "$root/.venv" && mkdir "$scratch" &&
        "${pip[@]}" install "${@/#/--requirement=$root/}" &&
        "${pip[@]}" install --no-deps --editable "$root" && rm -r "$scratch"
}

# prepare_guest: kernel, initramfs and tools drive.
prepare_guest() {
    local home=/var/lib/aenv
    [ "$(id -u)" = 0 ] || home=${XDG_DATA_HOME:-$HOME/.local/share}/aenv
    home=${AENV_HOME:-$home}
    if [ ! -e "$home/guest/guest.json" ]; then
        need_space "$home" 1500 "guest files and a template"
        refresh_lists # the kernel's package is found in them
    fi
    aenv setup
}

# make_base: the template base, of the host's own suite, which its mirror surely has.
make_base() {
    if aenv template list --names | grep -x base >/dev/null; then # -q would end before all is written
        say "The template base is there"
    else
        say "Building the template base from $suite (the longest step: a small distribution is installed)"
        aenv template create base --from "debootstrap:$suite"
    fi
}

aenv() { "$root/.venv/bin/aenv" "$@"; }
