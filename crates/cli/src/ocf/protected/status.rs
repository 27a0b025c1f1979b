//! State of a cluster, as `crm_mon` prints it.

use std::collections::BTreeMap;

use quick_xml::Reader;
use quick_xml::escape::unescape;
use quick_xml::events::attributes::{AttrError, Attribute};
use quick_xml::events::{BytesStart, Event};
use towline_launch::GuestName;

/// State of the cluster at one instant.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) has_quorum: bool,
    /// Hosts are fenced.
    pub(super) fences: bool,
    /// By name. One that is not known any more is in no known state.
    pub(super) nodes: BTreeMap<String, Node>,
}

/// A host, and what the cluster has of a guest's resource there.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) is_online: bool,
    /// It is to be fenced.
    pub(super) is_unclean: bool,
    /// An instance runs there, or may run.
    pub(super) has_instance: bool,
    pub(super) is_promoted: bool,
    /// An action is carried out there.
    pub(super) is_changing: bool,
    /// It is about to be recovered.
    pub(super) is_failed: bool,
    /// The cluster looks away.
    pub(super) is_unmanaged: bool,
    /// A host that the cluster does not run on itself, as a container.
    pub(super) is_guest: bool,
    /// Mark of its last start; a host that has left the cluster, or has just joined it, has none.
    pub(super) start: Option<String>,
}

impl Node {
    /// Returns true if the cluster recovers an instance there when that is reported to have failed. One that is only about to start would be recovered
    /// over and over: its failure counts as later than all of its starts.
    pub(super) fn can_be_recovered(&self) -> bool {
        let is_known = self.is_online && self.has_instance && self.start.is_some();
        is_known && !self.is_changing && !self.is_failed && !self.is_unmanaged
    }
}

/// Name of the attribute with the mark of the last start of an instance.
pub(super) fn start_name(guest: &GuestName) -> String {
    format!("towline-start-{guest}")
}

impl Status {
    /// Reads the XML of crm_mon (`pacemaker-result`, API 2) about a guest's resource.
    pub(super) fn parse(xml: &str, guest: &GuestName) -> Result<Self, String> {
        let (mut status, start_name) = (Self::default(), start_name(guest));
        let mut reader = Reader::from_str(xml);
        let mut path: Vec<String> = Vec::new();
        // Of the node in the list of attributes, and the instance that is described.
        let (mut of_node, mut instance) = (String::new(), None);
        loop {
            let event = reader.read_event().map_err(|error| error.to_string())?;
            let (element, is_open) = match &event {
                Event::Start(element) => (element, true),
                Event::Empty(element) => (element, false),
                Event::End(_) => {
                    path.pop();
                    continue;
                }
                Event::Eof if path.is_empty() && !status.nodes.is_empty() => return Ok(status),
                Event::Eof => return Err("it is cut off, or has no hosts".into()),
                _ => continue,
            };
            let name = String::from_utf8_lossy(element.name().as_ref()).into_owned();
            let values = values(element)?;
            let value = |name: &str| values.get(name).map(String::as_str).unwrap_or_default();
            let parent = path.last().map(String::as_str).unwrap_or_default();
            match (parent, name.as_str()) {
                ("summary", "current_dc") => status.has_quorum = value("with_quorum") == "true",
                ("summary", "cluster_options") => status.fences = value("stonith-enabled") == "true",
                ("nodes", "node") => {
                    let node = status.nodes.entry(value("name").to_owned()).or_default();
                    (node.is_online, node.is_unclean) =
                        (value("online") == "true", value("unclean") != "false");
                    node.is_guest = value("type") != "member";
                }
                (_, "resource") => {
                    let found = Node {
                        is_promoted: ["Promoted", "Master"].contains(&value("role")),
                        is_changing: values.contains_key("pending"),
                        is_failed: value("failed") == "true",
                        is_unmanaged: value("managed") == "false",
                        ..Node::default()
                    };
                    instance = (value("id") == guest.as_str()).then_some(found);
                }
                ("resource", "node") => {
                    if let (Some(found), Some(node)) = (&instance, status.nodes.get_mut(value("name"))) {
                        node.has_instance = true;
                        node.is_promoted |= found.is_promoted;
                        node.is_changing |= found.is_changing;
                        node.is_failed |= found.is_failed;
                        node.is_unmanaged |= found.is_unmanaged;
                    }
                }
                ("node_attributes", "node") => of_node = value("name").to_owned(),
                ("node", "attribute") if value("name") == start_name => {
                    if let Some(node) = status.nodes.get_mut(&of_node) {
                        node.start = Some(value("value").to_owned());
                    }
                }
                _ => {}
            }
            if is_open {
                path.push(name);
            }
        }
    }
}

fn values(element: &BytesStart<'_>) -> Result<BTreeMap<String, String>, String> {
    let value = |attribute: Result<Attribute<'_>, AttrError>| {
        let attribute = attribute.map_err(|error| error.to_string())?;
        let text = std::str::from_utf8(&attribute.value).map_err(|error| error.to_string())?;
        let text = unescape(text).map_err(|error| error.to_string())?;
        Ok((String::from_utf8_lossy(attribute.key.as_ref()).into_owned(), text.into_owned()))
    };
    element.attributes().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Pacemaker 2.1.5 prints it, shortened: node2 was cut off, and node3 has no instance.
    const XML: &str = r#"<pacemaker-result api-version="2.25" request="crm_mon -1 --output-as=xml">
  <summary>
    <current_dc present="true" version="2.1.5-a3f44794f94" name="node3" id="3" with_quorum="true" mixed_version="false"/>
    <cluster_options stonith-enabled="true" symmetric-cluster="true" no-quorum-policy="stop"/>
  </summary>
  <nodes>
    <node name="node1" id="1" online="true" standby="false" pending="false" unclean="false" is_dc="false" resources_running="2" type="member"/>
    <node name="node2" id="2" online="false" standby="false" pending="false" unclean="true" is_dc="false" resources_running="1" type="member"/>
    <node name="node3" id="3" online="true" standby="false" pending="false" unclean="false" is_dc="true" resources_running="0" type="member"/>
  </nodes>
  <resources>
    <resource id="fence" resource_agent="stonith:fence_lab" role="Started" active="true" nodes_running_on="1">
      <node name="node3" id="3" cached="true"/>
    </resource>
    <clone id="web-clone" multi_state="true" unique="false" managed="true">
      <resource id="web" resource_agent="ocf:towline:protected" role="Unpromoted" active="true" managed="true" failed="true" pending="Stopping" nodes_running_on="1">
        <node name="node2" id="2" cached="true"/>
      </resource>
      <resource id="web" resource_agent="ocf:towline:protected" role="Promoted" active="true" nodes_running_on="1">
        <node name="node1" id="1" cached="true"/>
      </resource>
      <resource id="web" resource_agent="ocf:towline:protected" role="Stopped" active="false" nodes_running_on="0"/>
    </clone>
  </resources>
  <node_attributes>
    <node name="node1">
      <attribute name="master-web" value="900000"/>
      <attribute name="towline-start-web" value="3c00c673594078d1"/>
    </node>
  </node_attributes>
  <status code="0" message="OK"/>
</pacemaker-result>"#;

    #[test]
    fn the_state_of_each_host_is_read() {
        let status = Status::parse(XML, &"web".parse().unwrap()).unwrap();
        assert!(status.has_quorum && status.fences);
        let start = Some("3c00c673594078d1".to_owned());
        let here = Node { is_online: true, has_instance: true, is_promoted: true, start, ..Node::default() };
        assert_eq!(status.nodes.get("node1"), Some(&here));
        assert!(here.can_be_recovered());
        let cut = Node {
            is_unclean: true,
            has_instance: true,
            is_failed: true,
            is_changing: true,
            ..Node::default()
        };
        assert_eq!(status.nodes.get("node2"), Some(&cut));
        assert_eq!(status.nodes.get("node3"), Some(&Node { is_online: true, ..Node::default() }));
        assert_eq!(status.nodes.get("node4"), None);
    }

    #[test]
    fn a_reply_that_is_cut_off_says_nothing() {
        for end in [0, 10, 700, 1500, XML.len() - 5] {
            assert!(Status::parse(&XML[..end], &"web".parse().unwrap()).is_err(), "{end}");
        }
    }
}
