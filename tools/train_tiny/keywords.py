"""The words echo-tiny can look up: each is one token (with its leading space) and none occurs in the filler text."""

PASSKEY = "passkey"

_WORDS = """
accordion acrobat airport almanac aluminum antelope apricot aquarium armadillo artichoke asparagus asteroid astronaut
avalanche avocado axolotl backpack bagel ballerina bamboo banjo baseball bassoon bathtub battery bazaar beagle beaver
bicycle biscuit bison blackboard blender blizzard blueberry bobcat bonfire boomerang bouquet broccoli bubblegum
buffalo bungalow burrito butterfly cabbage cactus canary cannonball canoe cappuccino caramel cardboard caribou cashew
chandelier cheetah chimpanzee chinchilla chipmunk chocolate clarinet cockatoo coconut coffee coyote cranberry crayon
crocodile croissant crossbow cupcake daffodil daisy dandelion dinosaur dolphin domino donut doorbell eclipse eggplant
elevator espresso eucalyptus falafel falcon firefly fireworks flamingo flashlight gadget galaxy gazelle geranium
geyser gibbon ginger giraffe glacier gondola gorilla grapefruit guitar hamster harmonica harpoon hazelnut hedgehog
helicopter hibiscus hippo hockey hourglass hummingbird hurricane hyena iceberg igloo iguana jackal jacket jaguar
jasmine jellyfish jigsaw jukebox kangaroo kayak ketchup kimono kiwi koala ladybug lagoon lasagna lavender lemonade
lemur lettuce lighthouse lilac lobster locomotive macaroni magnolia mandolin mango marigold marmalade meerkat meringue
meteor mongoose moose mosquito motorcycle muffin mushroom narwhal nectarine nutmeg oatmeal octopus orchid origami
oyster pagoda pajamas pancake panda panther papaya parachute parakeet parsnip peanut penguin peppermint piano
pineapple pistachio pizza platypus popcorn porcupine possum pretzel propeller pudding puffin pumpkin puppet quiche
raccoon radish raspberry ravioli reindeer rooster safari sailboat salamander sandwich saxophone scooter seahorse
shampoo skateboard skunk skyscraper snowman soccer spinach stadium starfish strawberry sunflower sushi swimmer tadpole
tambourine tangerine telescope thermometer tiger toaster tomato tornado tortilla toucan trampoline tricycle trombone
tulip turnip typhoon ukulele umbrella vanilla velvet violin volcano waffle walnut waterfall watermelon windmill
wolverine wombat woodpecker xylophone yogurt zeppelin zucchini
"""

KEY_WORDS: tuple[str, ...] = tuple(_WORDS.split())
