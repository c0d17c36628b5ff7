#!/bin/bash
# Turns this process into PID 1, systemd, of a machine that is a throw-away copy of this one: namespaces of its own (made by
# unshare, see machine.py), an overlay in memory over the root file system, control groups of its own.
# Usage: machine.sh DIR SHARED      DIR: an empty directory; SHARED: a directory that both see, at /shared there
set -eu
dir=$1 shared=$2
mount --make-rprivate /
mount -t tmpfs tmpfs "$dir"
mkdir "$dir/upper" "$dir/work" "$dir/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/upper,workdir=$dir/work" "$dir/root"
root=$dir/root
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -p "$root/shared"
mount --bind "$shared" "$root/shared"
ip link set lo up
cat > "$root/etc/systemd/system/pdd-machine.target" <<'UNIT'
[Unit]
Requires=systemd-journald.socket
AllowIsolate=yes
UNIT
cd "$root"
pivot_root . mnt
umount -l /mnt
exec env -i container=pdd-test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --log-target=null --unit=pdd-machine.target
