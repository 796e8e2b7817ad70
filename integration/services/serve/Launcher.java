import java.nio.file.Path;
import java.util.Map;
import org.elasticsearch.common.logging.LogConfigurator;
import org.elasticsearch.common.settings.Settings;
import org.elasticsearch.env.Environment;
import org.elasticsearch.node.Node;
import org.elasticsearch.plugins.PluginsLoader;

/** Runs one Elasticsearch node. The first argument is its home folder, the others are settings, name=value. */
public class Launcher {
    public static void main(String[] args) throws Exception {
        Settings.Builder settings = Settings.builder().put("path.home", args[0]);
        for (int i = 1; i < args.length; i++) {
            String[] setting = args[i].split("=", 2);
            settings.put(setting[0], setting[1]);
        }
        Environment env = new Environment(settings.build(), Path.of(args[0], "config"));
        LogConfigurator.setNodeName(env.settings().get("node.name"));
        LogConfigurator.registerErrorListener();
        LogConfigurator.configure(env, true);
        Node node = new Node(env, PluginsLoader.createPluginsLoader(
            PluginsLoader.loadModulesBundles(env.modulesDir()),
            PluginsLoader.loadPluginsBundles(env.pluginsDir()),
            Map.of()));
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            try {
                node.close();
            } catch (Exception e) {
                e.printStackTrace();
            }
        }));
        node.start();
        Thread.currentThread().join();
    }
}
