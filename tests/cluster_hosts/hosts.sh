#!/bin/bash
# Machines that are none: hosts.sh net | add I | remove I | boot I | power-off I | cut I | heal I | down
#
# Host I is a network, process, mount, host name and IPC namespace on a bridge, with the address $NET.(10+I), its own sshd,
# and this machine's file system under an overlay in memory: what it writes nobody else sees, and is gone after power-off.
# Needs root, iproute2, openssh-server and util-linux. HOSTS is the folder for keys and mounts, VENV the libraries.
set -euo pipefail
: "${HOSTS:?}" "${VENV:?}" "${NET:=10.231.77}" "${PREFIX:=sage}"
BRIDGE=${PREFIX}br
SSH=(ssh -q -i "$HOSTS/key" -o BatchMode=yes -o ConnectTimeout=2 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null)
address() { echo "$NET.$((10 + $1))"; }

inside() { # the first process of host $1, in its namespaces
  local folder=$HOSTS/$1 root=$HOSTS/$1/root
  hostname "$PREFIX$1"
  mount --make-rprivate /
  mount -t tmpfs -o size=8g tmpfs "$folder/memory"
  mkdir -p "$folder/memory/upper" "$folder/memory/work"
  mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/memory/upper,workdir=$folder/memory/work" "$root"
  mount -t proc proc "$root/proc"
  mount -t sysfs -o ro sysfs "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs -o size=1g tmpfs "$root/dev/shm"
  mount -t tmpfs -o size=4g,mode=1777 tmpfs "$root/tmp"
  mount -t tmpfs tmpfs "$root/run"
  mkdir -p "$root/run/sshd" "$root$VENV" "$root$HOSTS"
  mount --bind "$VENV" "$root$VENV"
  rm -rf "$root/root/.ssh" "$root/root/.ray" "$root/root/.bash_profile"
  mkdir -m 700 "$root/root/.ssh"
  install -m 600 "$HOSTS/key.pub" "$root/root/.ssh/authorized_keys"
  install -m 600 "$HOSTS/hostkey" "$root$HOSTS/hostkey"
  printf '%s\n' "export PATH=$VENV/bin:\$PATH RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1" \
    "unset HTTP_PROXY HTTPS_PROXY http_proxy https_proxy" > "$root/root/.bashrc"
  echo "source ~/.bashrc" > "$root/root/.profile"
  { echo "127.0.0.1 localhost"; for i in $(seq 1 20); do echo "$(address "$i") $PREFIX$i"; done; } > "$root/etc/hosts"
  : > "$root/etc/resolv.conf"
  printf '%s\n' "ListenAddress $(address "$1")" "HostKey $HOSTS/hostkey" "PermitRootLogin prohibit-password" "UsePAM no" \
    "StrictModes no" "UseDNS no" "MaxStartups 100" "Subsystem sftp internal-sftp" > "$root/etc/ssh/sshd_host"
  exec chroot "$root" /bin/bash -c '/usr/sbin/sshd -D -f /etc/ssh/sshd_host & while :; do wait -n 2>/dev/null || sleep 1; done'
}

net() {
  mkdir -p "$HOSTS"
  chmod 755 "$HOSTS"
  for name in key hostkey; do [ -f "$HOSTS/$name" ] || ssh-keygen -q -t ed25519 -N "" -f "$HOSTS/$name"; done
  ip link add "$BRIDGE" type bridge
  ip addr add "$NET.1/24" dev "$BRIDGE"
  ip link set "$BRIDGE" up
}

add() {
  ip netns add "$PREFIX$1"
  ip link add "$PREFIX-v$1" type veth peer name eth0 netns "$PREFIX$1"
  ip link set "$PREFIX-v$1" master "$BRIDGE" up
  ip -n "$PREFIX$1" link set lo up
  ip -n "$PREFIX$1" addr add "$(address "$1")/24" dev eth0
  ip -n "$PREFIX$1" link set eth0 up
  ip -n "$PREFIX$1" route add default via "$NET.1"
  boot "$1"
}

boot() {
  mkdir -p "$HOSTS/$1/memory" "$HOSTS/$1/root"
  setsid ip netns exec "$PREFIX$1" unshare --mount --uts --ipc --pid --fork --kill-child "$(readlink -f "$0")" inside "$1" \
    > "$HOSTS/$1/log" 2>&1 < /dev/null &
  echo $! > "$HOSTS/$1/process"
  for _ in $(seq 200); do
    "${SSH[@]}" "root@$(address "$1")" true 2> /dev/null && return
    sleep 0.1
  done
  cat "$HOSTS/$1/log" >&2
  return 1
}

power_off() { kill -9 "$(cat "$HOSTS/$1/process")"; }

remove() {
  power_off "$1" 2> /dev/null || true
  sleep 0.2
  ip netns del "$PREFIX$1"
  rm -rf "${HOSTS:?}/$1"
}

down() {
  for file in "$HOSTS"/*/process; do [ -f "$file" ] && remove "$(basename "$(dirname "$file")")" || true; done
  ip link del "$BRIDGE" 2> /dev/null || true
  rm -rf "$HOSTS"
}

case "${1:?}" in
  inside | add | boot | remove) "$1" "$2" ;;
  power-off) power_off "$2" ;;
  cut) ip link set "$PREFIX-v$2" down ;;
  heal) ip link set "$PREFIX-v$2" up ;;
  net | down) "$1" ;;
  *) exit 2 ;;
esac
