# Shared by install and uninstall: where the service is, and what may be done with it. Sourced, not run.
# shellcheck shell=bash disable=SC2034 # used where this file is sourced

prefix=/opt/agentenv        # one directory per version under versions/, and current, a link to one of them
home=/var/lib/aenv          # the node's data
defaults=/etc/default/agentenv
unit=/etc/systemd/system/agentenv.service
groups=/etc/systemd/system/agentenv-machines.service # whose control groups machines are in
command=/usr/local/bin/aenv # a link to the current version's

# need_root_and_systemd ARGUMENT...: go on as root, on a host that runs systemd.
need_root_and_systemd() {
    [ "$(id -u)" = 0 ] || exec sudo --preserve-env=http_proxy,https_proxy,no_proxy,HTTP_PROXY,HTTPS_PROXY,NO_PROXY \
        "$0" "$@"
    [ -d /run/systemd/system ] || fail "systemd does not run this host" \
        "scripts/quickstart, which needs no service manager"
}

# service VERB: what it says is shown only if it fails. What is asked for is no crash: earlier starts do not count
# against it, or a node that was restarted often would stay down in the middle of an upgrade.
service() {
    systemctl reset-failed agentenv.service 2>/dev/null || true
    quietly systemctl --no-pager "$1" agentenv.service
}

# ours LINK: whether nobody else made it.
ours() { if [ -e "$1" ] || [ -L "$1" ]; then [[ "$(readlink "$1")" == "$prefix"/* ]]; fi; }

# What the others call: the installed program, on the service's data.
aenv() { AENV_HOME=$home "$prefix/current/bin/aenv" "$@"; }

# installed: the version that is current, if there is one.
installed() { readlink -e "$prefix/current" || true; }
