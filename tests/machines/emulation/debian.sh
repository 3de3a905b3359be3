# shellcheck shell=bash
# Sourced by the scripts beside it, which take qemu and more from one Debian
# release, so that every machine emulates alike.

cache=${XDG_CACHE_HOME:-$HOME/.cache}/fusednorm-emulation
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

say() { echo "${0##*/}: $*" >&2; }
die() { say "error: $*"; exit 2; }

[ "$(uname -sm)" = "Linux x86_64" ] || die "this runs on x86-64 Linux only"
case $cache in *[[:space:]]*) die "the cache folder's name has a space in it: set XDG_CACHE_HOME" ;; esac

# One set-up at a time, since tox may start several scripts at once.
lock() {
    mkdir -p "$cache"
    exec 9>"$cache/lock"
    flock -n 9 || { say "waiting for another set-up"; flock 9; }
}
unlock() { exec 9>&-; }

# install PACKAGE...: on this machine
install() {
    command -v apt-get >/dev/null || die "missing: $* (and there is no apt-get)"
    [ "$(id -u)" = 0 ] || die "missing packages; run: sudo apt-get install $*"
    say "installing $*"
    apt-get -qq update >&2 || die "apt-get update failed"
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends -o Dpkg::Use-Pty=0 install "$@" >/dev/null ||
        die "apt-get could not install $*"
}

# download FOLDER ARCHITECTURE PACKAGE...: the packages, and what they depend on,
# into FOLDER/archives. apt keeps its state in FOLDER too: neither root nor a
# change of this machine's packages is needed.
download() {
    local apt=$1 architecture=$2 mirror options
    shift 2
    mirror=${FUSEDNORM_DEBIAN_MIRROR:-$(grep -rhE '^(deb|URIs:) ' /etc/apt/sources.list{,.d} 2>/dev/null |
        grep -oE 'https?://[^ ]+/debian/?( |$)' | head -n 1)} || true
    [ -n "$mirror" ] || die "no Debian mirror is configured here: set FUSEDNORM_DEBIAN_MIRROR to the URL of one"
    mkdir -p "$apt"/lists/partial "$apt"/archives/partial
    : >"$apt/status"
    echo "deb [signed-by=$keyring] ${mirror% } trixie main" >"$apt/sources.list"
    options=(-qq -o Dir::State="$apt" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt"
        -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::Etc::preferencesparts=/dev/null -o APT::Architecture="$architecture"
        -o APT::Architectures="$architecture,amd64" -o APT::Install-Recommends=false
        -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3)
    apt-get "${options[@]}" update >&2
    apt-get "${options[@]}" -y -d install "$@" >/dev/null
}

# unpack_qemu FOLDER TARGET TO: the program qemu-TARGET, which is static, out of FOLDER/archives
unpack_qemu() {
    dpkg-deb --fsys-tarfile "$1"/archives/qemu-user_*.deb | tar -x -C "$3" --strip-components=3 "./usr/bin/qemu-$2"
}
