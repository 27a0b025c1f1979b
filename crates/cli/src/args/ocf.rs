//! `towline ocf`.

/// Carry out an action of a Pacemaker resource agent for a guest, as `ocf:towline:guest`
///
/// Pacemaker starts it, by /usr/lib/ocf/resource.d/towline/guest, with the resource's parameters in the environment
/// (OCF_RESKEY_NAME): start, stop, monitor, migrate_to, migrate_from, reload-agent, meta-data, validate-all. A
/// guest is started from the newest state on the shared storage, saved there when it is stopped, and moved live
/// over ssh. Exit status: that of OCF; 0 done; 7 the guest does not run here; 1 failed; 2, 5, 6 a parameter, the
/// host or the configuration is not usable; 3 no such action.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  Parameters of the resource, with their defaults:
    towline ocf meta-data
  The state of a guest on this host, as the cluster sees it (docs/cluster.md):
    OCF_RESKEY_name=web OCF_RESKEY_image=/srv/shared/web.img OCF_RESKEY_state=/srv/shared/towline \\
      towline ocf monitor; echo $?
")]
pub(crate) struct OcfArgs {
    /// The action
    #[arg(value_name = "ACTION")]
    pub(crate) action: String,
}
