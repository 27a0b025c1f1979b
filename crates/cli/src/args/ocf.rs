//! `towline ocf`.

/// Carry out an action of a Pacemaker resource agent, as `ocf:towline:guest` and `ocf:towline:protected`
///
/// Pacemaker starts it, by /usr/lib/ocf/resource.d/towline/AGENT, with the resource's parameters in the environment
/// (OCF_RESKEY_NAME). guest: start, stop, monitor, migrate_to, migrate_from, reload-agent, meta-data, validate-all;
/// it is started from the newest state on the shared storage, saved there when it is stopped, and moved live over
/// ssh. protected: start, stop, promote, demote, monitor, meta-data, validate-all, of a guest of `towline protect
/// --arbiter pacemaker`, whose claims `arbitrate` answers. Exit status: that of OCF; 0 done; 7 it does not run
/// here; 8 it runs, promoted; 9 promoted, but failed; 1 failed; 2, 5, 6 a parameter, the host or the configuration
/// is not usable; 3 no such action.
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
    /// The agent
    #[arg(value_name = "AGENT", value_enum, default_value_t = OcfAgent::Guest)]
    pub(crate) agent: OcfAgent,
}

/// A resource agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OcfAgent {
    /// A guest that the cluster runs
    Guest,
    /// The host that goes on with a protected guest
    Protected,
}
