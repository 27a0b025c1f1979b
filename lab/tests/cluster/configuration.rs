//! The first configuration of a cluster: its resources, and a power switch for each host.

use std::fs;

use towline_lab::wait_until;

use crate::hosts::{Cluster, WITHIN};

/// Values by name, of the set with this id.
pub(crate) fn values(id: &str, values: &[(&str, &str)]) -> String {
    let value = |(name, value): &(&str, &str)| {
        format!("<nvpair id=\"{id}-{name}\" name=\"{name}\" value=\"{value}\"/>")
    };
    values.iter().map(value).collect()
}

/// An action of a resource with its timeout in seconds.
pub(crate) fn operation(resource: &str, name: &str, seconds: u32) -> String {
    format!("<op id=\"{resource}-{name}\" name=\"{name}\" interval=\"0s\" timeout=\"{seconds}s\"/>")
}

/// The monitoring of a resource in a role, each of these seconds.
pub(crate) fn monitor(resource: &str, interval: u32, role: &str) -> String {
    format!(
        "<op id=\"{resource}-monitor-{role}\" name=\"monitor\" interval=\"{interval}s\" timeout=\"20s\" role=\"{role}\"/>"
    )
}

/// Gives the cluster these resources before its hosts are booted, and its policy of a part without quorum.
pub(crate) fn configure(cluster: &Cluster, resources: &str, constraints: &str, no_quorum: &str) {
    let options = values(
        "options",
        &[
            ("stonith-enabled", "true"),
            ("stonith-action", "off"),
            ("dc-deadtime", "2s"),
            // One after another otherwise, on a busy machine.
            ("load-threshold", "0%"),
            ("no-quorum-policy", no_quorum),
        ],
    );
    let fence =
        values("fence", &[("pcmk_host_check", "static-list"), ("pcmk_host_list", "node1 node2 node3")]);
    let configuration = format!(
        "<cib crm_feature_set=\"3.1.0\" validate-with=\"pacemaker-3.9\" admin_epoch=\"0\" epoch=\"1\" num_updates=\"0\"><configuration>\
         <crm_config><cluster_property_set id=\"options\">{options}</cluster_property_set></crm_config><nodes/><resources>\
         <primitive id=\"fence\" class=\"stonith\" type=\"fence_lab\"><instance_attributes id=\"fence-attributes\">{fence}\
         </instance_attributes></primitive>{resources}</resources><constraints>{constraints}</constraints>\
         <rsc_defaults><meta_attributes id=\"defaults\"><nvpair id=\"defaults-stickiness\" name=\"resource-stickiness\" value=\"100\"/>\
         </meta_attributes></rsc_defaults></configuration><status/></cib>\n"
    );
    fs::write(cluster.shared("cib.xml"), configuration).unwrap();
}

/// Waits until all hosts are members.
pub(crate) fn wait_members(cluster: &Cluster) {
    wait_until("three members", WITHIN, || Ok((online(cluster) == 3).then_some(()))).unwrap();
}

/// Hosts that are members, as one of them sees it.
fn online(cluster: &Cluster) -> usize {
    let output = cluster.on(cluster.any(), &["crm_mon", "-1", "--output-as=xml"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_online = |line: &&str| {
        line.contains("<node name=") && line.contains("online=\"true\"") && line.contains("pending=\"false\"")
    };
    text.lines().filter(is_online).count()
}
