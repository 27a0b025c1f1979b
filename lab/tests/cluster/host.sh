# The first process of a host of a cluster: its own view of the files of this machine, sshd, corosync, pacemaker.
# Arguments: number of the host, directory of the test, packages, sshd, and `managed` for a cluster.
n=$1 place=$2 packages=$3 sshd=$4
set -e
mount --make-rprivate /
mount -t proc proc /proc
# A host that learns of its own fencing writes here, and would reboot the machine.
if [ -e /proc/sysrq-trigger ]; then : >"$place/sysrq.$n"; mount --bind "$place/sysrq.$n" /proc/sysrq-trigger; fi
hostname "node$n"
mount -t overlay -o "ro,lowerdir=$place/usr:$packages/usr:/usr" overlay /usr
for directory in /run /dev/shm /var/lib /var/log; do mount -t tmpfs -o mode=755 tmpfs $directory; done
mkdir -p /run/etc/up /run/etc/work /run/lab /run/sshd /run/lock /run/crm /run/resource-agents
mount -t overlay -o "lowerdir=$packages/etc:/etc,upperdir=/run/etc/up,workdir=/run/etc/work" overlay /etc
chmod 1777 /dev/shm
mount --bind "$place/node$n" /run/lab
cp "$place/passwd" "$place/group" "$place/hosts" /etc/
cp "$place/corosync.conf" /etc/corosync/corosync.conf
mkdir -p /var/lib/corosync /var/log/corosync /var/log/pacemaker /var/log/cluster /etc/pacemaker
for directory in blackbox cib cores pengine; do mkdir -p /var/lib/pacemaker/$directory; done
cp "$place/cib.xml" /var/lib/pacemaker/cib/cib.xml
chown -R hacluster:haclient /var/lib/pacemaker /var/log/pacemaker /run/crm
chmod 750 /var/lib/pacemaker/*
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
export PCMK_logfile="$place/pacemaker.$n.log" PCMK_logfacility=none PCMK_panic_action=reboot
"$sshd" -D -e -f "$place/sshd_config.$n" 2>>"$place/sshd.$n.log" &
if [ "$5" = managed ]; then
  corosync -f >>"$place/corosync.$n.log" 2>&1 &
  until corosync-cmapctl -g runtime.votequorum.this_node_id >/dev/null 2>&1; do sleep 0.05; done
  pacemakerd >>"$place/pacemakerd.$n.log" 2>&1 &
fi
echo booted >"$place/node$n/booted"
while :; do sleep 3600 & wait $! || :; done
