#!/bin/sh
# Fence agent of these tests: the power switch of a host is its control group. Requests are on standard input.
groups=@GROUPS@ log=@LOG@
action=reboot host=
case "$*" in *metadata*) action=metadata ;; *)
  while read -r line; do
    case $line in
    action=*) action=${line#*=} ;;
    port=* | plug=*) host=${line#*=} ;;
    nodename=*) host=${host:-${line#*=}} ;;
    esac
  done
  ;;
esac
case $action in
metadata)
  cat <<END
<?xml version="1.0" ?>
<resource-agent name="fence_lab" shortdesc="Power switch of the hosts of a test">
<longdesc>Kills every process of a host.</longdesc>
<parameters>
<parameter name="action" unique="0" required="0"><getopt mixed="-o, --action=[action]"/><content type="string" default="off"/><shortdesc lang="en">Action</shortdesc></parameter>
<parameter name="port" unique="0" required="0"><getopt mixed="-n, --plug=[id]"/><content type="string"/><shortdesc lang="en">Host</shortdesc></parameter>
</parameters>
<actions><action name="on"/><action name="off"/><action name="reboot"/><action name="status"/><action name="list"/><action name="monitor"/><action name="metadata"/></actions>
</resource-agent>
END
  ;;
list) for n in 1 2 3; do echo "node$n,"; done ;;
monitor) [ -d "$groups" ] ;;
status) grep -q 'populated 1' "$groups/$host/cgroup.events" || exit 2 ;;
off | reboot)
  echo 1 >"$groups/$host/cgroup.kill"
  while grep -q 'populated 1' "$groups/$host/cgroup.events"; do sleep 0.02; done
  echo "$host is off, by $(uname -n)" >>"$log"
  ;;
on) ;;
*) exit 1 ;;
esac
